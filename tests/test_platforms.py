"""What macOS, Windows and aarch64 Linux lack is not needed: Triton, POSIX, torch.distributed, UTF-8 as the default.

Nothing here runs there. One process on this machine has no Triton and none of what Windows lacks; another has a torch
without torch.distributed; and the sources are read for what would need them.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
FILES = sorted(SRC.rglob("*.py"))

POSIX_MODULES = {"crypt", "fcntl", "grp", "nis", "posix", "pty", "pwd", "resource", "spwd", "syslog", "termios", "tty"}
POSIX_NAMES = {
    "os": (
        "WEXITSTATUS WIFEXITED chown chroot fchown fork forkpty geteuid getgid getloadavg getpgid getuid initgroups "
        "killpg lchown mkfifo nice openpty pread pwrite register_at_fork sched_getaffinity sched_setaffinity "
        "sched_yield setpgid setsid setuid statvfs sysconf ttyname uname wait wait3 wait4 waitid"
    ).split(),
    "signal": (
        "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 SIGVTALRM "
        "alarm pause pthread_kill pthread_sigmask setitimer siginterrupt sigwait"
    ).split(),
}
"""What Python has on Linux and not on Windows; macOS lacks a part of it."""

LINUX_ONLY = {
    "launchers.py": "builds C modules for the CUDA driver with gcc, where Triton is",
    "testing/offline.py": "compiles with Triton and reads machine code with NVIDIA's tools",
    "tune.py": "sweeps on a CUDA device, with Triton",
}
"""Files that nothing reaches where there is no Triton."""


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix().partition("/")[2]


# A machine without Triton and without POSIX

PROBES = """
import io, json, os, pathlib, signal, sys, traceback
import torch

HIDDEN = {hidden!r}
NAMES = {names!r}


class Hiding:  # a finder that does not find what is hidden
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)


for name in [name for name in sys.modules if name.partition(".")[0] in HIDDEN]:
    del sys.modules[name]
sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
for module in (os, signal):
    for name in NAMES[module.__name__]:
        if hasattr(module, name):
            delattr(module, name)
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path, *args: not path.as_posix().startswith("/proc") and exists(path, *args)


def probe_import():
    import stream_attention

    for name in stream_attention.__all__:
        getattr(stream_attention, name)


def probe_forward_and_backward():
    from stream_attention import attention, explain

    q, k, v = (torch.randn(2, 33, 4, 16, requires_grad=True) for _ in range(3))
    for arguments in ({{}}, {{"window": (8, 0), "softcap": 20.0}}):
        attention(q, k, v, causal=True, **arguments).sum().backward()
    assert q.grad.isfinite().all() and explain(q, k, v).backend == "eager"


def probe_varlen():
    from stream_attention import varlen_attention

    q, k, v = (torch.randn(30, 4, 16, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, 10, 30], dtype=torch.int32)
    varlen_attention(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True).sum().backward()
    assert k.grad.isfinite().all()


def probe_decode():
    from stream_attention import ContiguousKV, decode_attention, quantize_kv

    k, v = torch.randn(2, 2, 64, 2, 16)
    lengths = torch.zeros(2, dtype=torch.int32)
    cache = ContiguousKV(torch.zeros_like(k), torch.zeros_like(v), lengths)
    cache.append(k[:, :40], v[:, :40])
    q = torch.randn(2, 1, 4, 16)
    assert decode_attention(q, cache).isfinite().all()
    assert decode_attention(q, quantize_kv(ContiguousKV(k, v), "int8")).isfinite().all()


def probe_modules():
    from stream_attention import FlashAttentionV3, StreamAttention, StreamAttentionConfig, StreamMultiheadAttention

    StreamAttention(StreamAttentionConfig(num_heads=4, head_dim=16))(torch.randn(1, 20, 64)).sum().backward()
    StreamMultiheadAttention(64, 4, batch_first=True)(*[torch.randn(1, 20, 64)] * 3, need_weights=False)
    q = torch.randn(1, 20, 4, 16)
    FlashAttentionV3(StreamAttentionConfig(num_heads=4, head_dim=16))(q, q, q)


def probe_compression():
    from stream_attention import create_kv_compressor

    assert create_kv_compressor("streaming") is not None


def probe_memory():
    from stream_attention import MemoryProfiler

    profiler = MemoryProfiler("cpu")
    profiler.start()
    with profiler.region("make"):
        torch.zeros(1 << 16)
    assert profiler.report()["regions"][0]["name"] == "make"
    profiler.stop()


def probe_ranks():
    from stream_attention.distributed import VirtualRanks, ring_attention

    shards = [tuple(torch.randn(3, 1, 8, 2, 16)) for _ in range(2)]
    found = ring_attention(*map(list, zip(*shards)), causal=True, group=VirtualRanks(2))
    assert all(out.isfinite().all() for out in found)


def probe_hugging_face():
    import stream_attention.integration.hf as hf

    try:
        import transformers
    except Exception as error:  # it may need what is hidden
        print("transformers:", error)
        return
    hf.register()


def probe_reference():
    from stream_attention import attention

    q = torch.randn(1, 9, 2, 8)
    assert (attention(q, q, q, backend="reference") - attention(q, q, q)).abs().max() < 1e-5


def probe_triton_is_refused():
    from stream_attention import UnsupportedProblem, attention

    q = torch.randn(1, 9, 2, 8)
    for backend in ("triton", "gluon"):
        try:
            attention(q, q, q, backend=backend)
        except UnsupportedProblem as refused:
            assert "Triton is not installed" in str(refused), refused
        else:
            raise AssertionError(f"{{backend}} was not refused")


def command(*words):
    from stream_attention_tools.cli.main import main

    kept, sys.stdout = sys.stdout, io.TextIOWrapper(io.BytesIO(), encoding="cp1252")  # a pipe in Windows
    try:
        code = main(list(words))
    except SystemExit as left:
        code = left.code
    finally:
        sys.stdout.flush()
        printed, sys.stdout = sys.stdout.buffer.getvalue().decode("cp1252"), kept
    return code, printed


def probe_help():
    from stream_attention_tools.cli.main import COMMANDS

    for words in ([], *([name] for name in COMMANDS)):
        code, printed = command(*words, "--help")
        assert code == 0 and printed.startswith("usage: "), (words, code, printed)


def probe_info():
    code, printed = command("info")
    assert code == 0 and "no Triton" in printed and "off: no CUDA device" in printed, printed
    code, printed = command("info", "--json", "--check")
    assert code == 0 and json.loads(printed)["check"]["passed"], printed


def probe_plan():
    code, printed = command("plan", "--q", "1x64x4x32", "--device", "cpu")
    assert code == 0 and "eager" in printed, printed


def probe_warmup_is_refused():
    kept, sys.stderr = sys.stderr, io.StringIO()
    try:
        code, _ = command("warmup")
    finally:
        said, sys.stderr = sys.stderr.getvalue(), kept
    assert code == 2 and "Triton is not installed" in said, (code, said)


def tried(probe):
    try:
        probe()
    except BaseException:
        return traceback.format_exc()
    return ""


probes = [name for name in list(globals()) if name.startswith("probe_")]
found = {{name.removeprefix("probe_"): tried(globals()[name]) for name in probes}}
seen = sorted(name for name in sys.modules if name.partition(".")[0] in HIDDEN and sys.modules[name] is not None)
print(json.dumps({{"seen": seen, **found}}))
"""
SCRIPT = PROBES.format(hidden={"triton", *POSIX_MODULES} - {"posix"}, names=POSIX_NAMES)  # `os` is made of posix
NAMES = re.findall(r"^def probe_(\w+)", SCRIPT, re.MULTILINE)


def python(script: str, *flags: str, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    env |= {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *flags, "-c", script, *arguments], env=env, capture_output=True, encoding="utf-8", timeout=300
    )


@pytest.fixture(scope="module")
def without_posix() -> dict[str, Any]:
    done = python(SCRIPT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.xdist_group("without_posix")
@pytest.mark.parametrize("probe", NAMES)
def test_without_triton_and_posix(without_posix: dict[str, Any], probe: str) -> None:
    assert without_posix[probe] == ""


@pytest.mark.xdist_group("without_posix")
def test_what_was_hidden_stayed_hidden(without_posix: dict[str, Any]) -> None:
    assert without_posix["seen"] == []


OTHER_PACKAGE = """
import importlib.metadata, sys
import torch

version = importlib.metadata.version


def other(package):
    if package == "triton":
        raise importlib.metadata.PackageNotFoundError(package)
    return version(package)


importlib.metadata.version = other
sys.path.insert(0, sys.argv[1])
from stream_attention import attention
from stream_attention.backends.installed import triton_release
from stream_attention_tools.cli.info import main

q = torch.randn(1, 9, 2, 8)
attention(q, q, q)
print(triton_release())
sys.exit(main([]))
"""


def test_a_triton_of_another_package_has_its_version_in_its_module(tmp_path: Path) -> None:
    """triton-windows and pytorch-triton-rocm bring the module `triton`, and there is no package of that name."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("__version__ = '3.6.0.post26'\n")
    done = python(OTHER_PACKAGE, arguments=[str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3.6\n") and ", Triton 3.6\n" in done.stdout


# A torch without torch.distributed

WITHOUT_DISTRIBUTED = """
import sys, types
import torch

stub = types.ModuleType("torch.distributed")  # as torch/distributed/__init__.py is in a build without it
stub.is_available = lambda: False
for name in [name for name in sys.modules if name.startswith("torch.distributed")]:
    del sys.modules[name]
sys.modules["torch.distributed"] = torch.distributed = stub

import stream_attention
import stream_attention.core
from stream_attention import attention, ring_attention
from stream_attention.distributed import Processes, VirtualRanks, initialize

q = torch.randn(1, 16, 2, 8, requires_grad=True)
attention(q, q, q, causal=True).sum().backward()
found = ring_attention([q[:, :8], q[:, 8:]], [q[:, :8], q[:, 8:]], [q[:, :8], q[:, 8:]], group=VirtualRanks(2))
assert (torch.cat(found, 1) - attention(q, q, q)).abs().max() < 1e-5
for name in stream_attention.__all__:
    getattr(stream_attention, name)
for call in (initialize, Processes):
    try:
        call()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_without_torch_distributed_one_process_works_and_several_are_refused() -> None:
    done = python(WITHOUT_DISTRIBUTED)
    assert done.returncode == 0, done.stderr
    initialize, processes = done.stdout.splitlines()
    for said in (initialize, processes):
        assert said.startswith("ValueError: torch.distributed: expected a build of torch with it; got one without")


# Nothing depends on the default encoding, which is UTF-8 on Linux and cp1252 on many a Windows


@pytest.mark.parametrize(
    "words", [["info"], ["info", "--json"], ["plan", "--q", "1x64x4x32", "--device", "cpu"]], ids=str
)
def test_a_command_reads_and_writes_no_file_in_the_default_encoding(words: list[str]) -> None:
    script = f"import sys\nfrom stream_attention_tools.cli.main import main\nsys.exit(main({words}))"
    done = python(script, "-X", "warn_default_encoding", "-W", "always::EncodingWarning")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "EncodingWarning" in line and "stream_attention" in line] == []


def calls_without_encoding(source: str) -> Iterator[int]:
    """Lines of calls that read or write text in the default encoding."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        name = ast.unparse(node.func)
        method = name.rpartition(".")[2]
        if "encoding" in keywords:
            continue
        if method in ("read_text", "write_text"):
            yield node.lineno
        elif method in ("run", "Popen", "check_output") and name.startswith("subprocess."):
            if {"text", "universal_newlines"} & keywords.keys():
                yield node.lineno
        elif method == "open" and name not in ("os.open", "lzma.open"):
            mode = keywords.get("mode") or next(iter(node.args[1:] if name == "open" else node.args), None)
            text = mode is None or (isinstance(mode, ast.Constant) and "b" not in str(mode.value))
            if text and (name == "open" or node.args):  # `allocator.open()` is no file
                yield node.lineno


def test_the_search_for_encodings_sees_what_it_should() -> None:
    wrong = "p.read_text()\np.write_text(x)\nopen(p)\nopen(p, 'w')\np.open('a')\nsubprocess.run(c, text=True)\n"
    assert list(calls_without_encoding(wrong)) == [1, 2, 3, 4, 5, 6]
    right = "p.read_text(encoding='utf-8')\nopen(p, 'rb')\np.open('wb')\nos.open(p, 0)\nsubprocess.run(c)\nx.open()\n"
    assert list(calls_without_encoding(right)) == []


def test_no_file_is_read_or_written_in_the_default_encoding() -> None:
    found = {
        f"{name_of(path)}:{line}"
        for path in FILES
        if name_of(path) not in LINUX_ONLY
        for line in calls_without_encoding(path.read_text(encoding="utf-8"))
    }
    assert found == set()


# No POSIX in the sources

GUARDED = {
    ("cli/warmup.py", "os.sched_getaffinity"): "behind hasattr, with the count of all cores instead",
    ("dispatch/launch_cache.py", "os.register_at_fork"): "behind hasattr: where there is no fork",
}


def posix_imports(source: str) -> set[str]:
    """POSIX-only modules that are imported outside of a function."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and not child.level:
                found.add((child.module or "").partition(".")[0])
            walk(child)

    walk(ast.parse(source))
    return found & POSIX_MODULES


def posix_names(source: str) -> set[str]:
    """POSIX-only names of os and signal that are used anywhere."""
    return {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.attr in POSIX_NAMES.get(node.value.id, ())
    }


def test_the_search_for_posix_sees_what_it_should() -> None:
    source = "import fcntl, os\nfrom resource import getrusage\ndef f():\n    import pwd\n    os.fork()\n"
    assert posix_imports(source) == {"fcntl", "resource"} and posix_names(source) == {"os.fork"}


def test_no_module_imports_what_is_posix_only() -> None:
    assert {name_of(path): found for path in FILES if (found := posix_imports(path.read_text(encoding="utf-8")))} == {}


def test_posix_names_are_used_behind_a_guard() -> None:
    used = {(name_of(path), name) for path in FILES for name in posix_names(path.read_text(encoding="utf-8"))}
    assert used == GUARDED.keys()


def test_files_that_are_exempt_exist() -> None:
    assert LINUX_ONLY.keys() <= {name_of(path) for path in FILES}
