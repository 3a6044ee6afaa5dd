"""Compile kernels for a GPU that is not there, and read what the compiler made of them.

Triton, ptxas and the disassembler need no GPU, so registers, spills and matrix instructions are checked anywhere:

    with compiling_for(90) as compiled:
        BY_NAME["triton"].forward(problem, inputs_on_the_cpu, config)      # launches are compiled, not run
    report(compiled[0]).spill_bytes
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.compiler import make_backend

from ..offline import Form, launching_for

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Report(NamedTuple):
    """What one compiled kernel costs."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    warps: int
    instructions: Counter[str]  # by opcode, such as "HGMMA" (Hopper), "HMMA" (Ampere), "MUFU", "LDGSTS"
    warnings: tuple[str, ...]


@contextmanager
def compiling_for(arch: int) -> Iterator[list[Any]]:
    """Within this block, launches of jit functions compile for compute capability `arch` (90 for 9.0) and do not run.

    CPU tensors stand for pointers. Yields the list of compiled kernels, in launch order.
    """
    compiled: list[Any] = []
    with launching_for(arch, lambda form: compiled.append(_compile(form))):
        yield compiled


def in_fresh_processes(compile: Callable[[Any], None], jobs: Iterable[Any], workers: int | None = None) -> list[str]:
    """Call `compile` with each job, in parallel: by job, what went wrong, or nothing.

    Fresh processes, since a fork of one that has used CUDA, or has threads, may hang.
    """
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(_error_of, compile), jobs))


def _error_of(compile: Callable[[Any], None], job: Any) -> str:
    try:
        compile(job)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _compile(form: Form) -> Any:
    with _assembler_log() as log:
        compiled = form.compile()
    compiled.assembler_log = log.getvalue()  # empty where Triton's cache had it
    return compiled


def _assemble(compiled: Any) -> str:
    """Assemble once more as Triton does, with the options of its release, and return the assembler's log."""
    target = compiled.metadata.target
    backend = make_backend(target)
    with _assembler_log() as log:
        # Warps do not concern the assembler, and those of all roles together need not be the power of 2 it asks for.
        options = backend.parse_options({**compiled.metadata._asdict(), "num_warps": 4})
        backend.make_cubin(compiled.asm["ptx"], {}, options, target.arch)
    return log.getvalue()


@contextmanager
def _assembler_log() -> Iterator[StringIO]:
    log = StringIO()
    with triton.knobs.nvidia.scope(), redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        yield log


def report(compiled: Any) -> Report:
    """Read the assembler's report, assembling again if it is not there, and count what is in the kernel."""
    log = compiled.assembler_log or _assemble(compiled)
    sass = disassemble(compiled)
    opcodes = re.findall(r"^\s+(?:/\*[0-9a-f]+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+)", sass, re.MULTILINE)
    return Report(
        registers=int(_find(r"Used (\d+) registers", log)),
        spill_bytes=int(_find(r"(\d+) bytes spill stores", log)) + int(_find(r"(\d+) bytes spill loads", log)),
        shared_bytes=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        instructions=Counter(opcodes),
        warnings=tuple(sorted(set(re.findall(r"\(C\d+\)[^\n]*|[Ww]arning[^\n]*", log)))),
    )


def disassemble(compiled: Any) -> str:
    """The machine code of a kernel that Triton has compiled, as text; it keeps it."""
    if not hasattr(compiled, "sass"):
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(compiled.asm["cubin"])
            compiled.sass = _run(_TOOLS / "nvdisasm", "-c", "-ndf", cubin)  # without data flow: a third less time
    text: str = compiled.sass
    return text


def _run(tool: Path, *arguments: str | Path) -> str:
    done = subprocess.run([str(tool), *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{tool.name} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout + done.stderr


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern!r} in the assembler's report:\n{text}")
    return found[1]
