"""python -m stream_attention.cli.info [--json] [--no-check]: what is here, what can run here, and whether it is right.

Prints versions, the machine and its GPUs, each backend with its reasons against a typical problem, the environment
variables that matter, and a self-check: a small causal forward and backward beside the fp64 reference, within the
tolerance of the tests. The exit code is 1 if the self-check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from .. import __version__
from ..backends import BACKENDS
from ..benchmark import results as results_
from ..device import arch, processors
from ..ops.explain import problems_of_call
from ..plan import plan
from ..problem import Problem
from ..testing.inputs import Case
from ..testing.tolerance import check_case
from .ending import quiet

EXTRAS = {"transformers": "hf", "matplotlib": "bench", "pyyaml": "bench", "rich": "bench"}
"""Package -> the extra that brings it."""

PEERS = {"FlashAttention-2": "flash_attn", "FlashAttention-3": "flash_attn_interface"}
"""Peer -> its module. They are really imported: one built for another torch is installed and yet not there."""

VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
PREFIXES = ("STREAM_ATTENTION_", "TRITON_", "NCCL_", "TORCHELASTIC_")
"""Environment variables that change what runs, or where, by name and by how their names begin."""


@quiet
def main(argv: Sequence[str] | None = None, prog: str = "python -m stream_attention.cli.info") -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument("--no-check", action="store_true", help="skip the self-check")
    options = parser.parse_args(argv)
    found = collect()
    if not options.json:
        print(text(found), flush=True)  # before the self-check: whatever that does, this has been said
    check = found["check"] = None if options.no_check else self_check()
    if options.json:
        print(json.dumps(found, indent=1))
    elif check is not None:
        print(f"\n{check_text(check)}")
    return 0 if check is None or check["passed"] else 1


def collect() -> dict[str, Any]:
    """Everything but the self-check, as JSON holds it; what is absent is None."""
    cpu = results_.conditions("cpu")["machine"]
    why_no_gpu = _why_no_gpu()
    return {
        "versions": {
            "stream_attention": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": _cudnn(),
            "triton": None if find_spec("triton") is None else _installed("triton") or "version unknown",
        },
        "extras": {package: _installed(package) for package in EXTRAS},
        "peers": {peer: _imported(module) for peer, module in PEERS.items()},
        "machine": {
            "os": platform.platform(),
            "cpu": cpu["name"],
            "isa": cpu["isa"],
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if why_no_gpu is None else [],
        "why_no_gpu": why_no_gpu,
        "driver": _driver(),
        "backends": _backends(_posed((1, 1024, 8, 128), (1, 1024, 8, 128))[0]),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name in VARIABLES or name.startswith(PREFIXES)
        },
    }


def self_check() -> dict[str, Any]:
    """Compare a small causal forward and backward on the best device with the fp64 reference.

    Returns:
        Whether it passed, in how many seconds (the first time on a GPU, compiling the kernels takes most of them), who
        computed what, and `error` and `allowed` of each result: "out", "lse", "d_query", ... Where it failed,
        `message` says how.
    """
    device, dtype = _best()
    case = Case(B=1, Tq=96, Tk=160, Hq=4, Hkv=2, D=64, Dv=64, dtype=dtype, device=str(device), causal=True)
    forward, backward = _posed((case.B, case.Tq, case.Hq, case.D), (case.B, case.Tk, case.Hkv, case.D))
    results: dict[str, dict[str, float]] = {}
    message = None
    begun = time.perf_counter()
    try:
        report = check_case(case)
        results = {name: {"error": report.errors[name], "allowed": report.bounds[name]} for name in report.errors}
    except Exception as error:  # whatever a broken installation raises is the answer
        message = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return {
        "passed": message is None,
        "seconds": round(time.perf_counter() - begun, 2),
        "problem": str(forward),
        "backends": {"forward": plan(forward).backend, "backward": plan(backward).backend},
        "results": results,
        "message": message,
    }


def text(found: dict[str, Any]) -> str:
    """What `collect` found, for a reader."""
    versions, machine, backends = found["versions"], found["machine"], found["backends"]
    cpu = f"{machine['cpu']}, {machine['cores']} cores, torch threads: {machine['threads']}, {machine['isa']}"
    rows = [
        ("stream-attention", versions["stream_attention"]),
        ("python", versions["python"]),
        ("torch", versions["torch"]),
        ("cuda", versions["cuda"] or "none: this build of torch has no CUDA"),
        *((name, str(versions[name])) for name in ("hip", "cudnn") if versions[name]),
        ("triton", versions["triton"] or "not installed"),
        *(
            (package, its or f'not installed; pip install "stream-attention[{EXTRAS[package]}]"')
            for package, its in found["extras"].items()
        ),
        *((peer, its["version"] or its["why_not"]) for peer, its in found["peers"].items()),
        ("os", machine["os"]),
        ("cpu", cpu),
        *((f"gpu {gpu['index']}", _gpu_text(gpu)) for gpu in found["gpus"]),
    ]
    if not found["gpus"]:
        rows.append(("gpu", f"none: {found['why_no_gpu']}"))
    if found["driver"] is not None:
        rows.append(("nvidia driver", f"{found['driver']['version']}; it sees {', '.join(found['driver']['gpus'])}"))
    return "\n".join(
        [
            *_aligned(rows),
            f"\nbackends, for {backends['problem']}",
            *_aligned((one["name"], _backend_text(one, backends["auto"])) for one in backends["all"]),
            "\nenvironment",
            *(_aligned(found["environment"].items()) or ["  nothing that matters is set"]),
        ]
    )


def check_text(check: dict[str, Any]) -> str:
    """What `self_check` found, for a reader."""
    who = ", ".join(f"{direction} by {backend}" for direction, backend in check["backends"].items())
    head = f"self-check {'passed' if check['passed'] else 'FAILED'} in {check['seconds']} s: {check['problem']}; {who}"
    results = check["results"].items()
    rows = _aligned((name, f"error {one['error']:.2e}, allowed {one['allowed']:.2e}") for name, one in results)
    return "\n".join([head, *rows, *([] if check["passed"] else [check["message"]])])


def _best() -> tuple[torch.device, torch.dtype]:
    """The best device here, and the dtype one uses there."""
    if _why_no_gpu() is not None:
        return torch.device("cpu"), torch.float32
    return torch.device("cuda", torch.cuda.current_device()), torch.bfloat16


def _posed(q_shape: tuple[int, ...], kv_shape: tuple[int, ...]) -> list[Problem]:
    """A causal forward on the best device, and its backward."""
    device, dtype = _best()
    query, key, value = (
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in (q_shape, kv_shape, kv_shape)
    )
    problems, _ = problems_of_call(query, key, value, causal=True)
    return [one._replace(device=device, arch=arch(device), processors=processors(device)) for one in problems]


def _why_no_gpu() -> str | None:
    """Why torch cannot use a GPU, in its own words; None if it can."""
    try:
        torch.cuda.init()
        torch.cuda.get_device_properties(torch.cuda.current_device())
    except Exception as error:  # AssertionError, RuntimeError, torch's own types: by build, driver and device
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None


def _cudnn() -> int | str | None:
    try:
        return torch.backends.cudnn.version()
    except RuntimeError as error:  # another one is found before the one torch was built with
        return str(error).splitlines()[0]


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def _gpu_text(gpu: dict[str, Any]) -> str:
    capability, memory = f"compute capability {gpu['capability']}", f"{gpu['memory_gib']} GiB"
    return f"{gpu['name']}, {capability}, {gpu['processors']} multiprocessors, {memory}"


def _driver() -> dict[str, Any] | None:
    """NVIDIA's driver and the GPUs it sees, whether or not this torch can use them."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    listed = [line.split(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    if done.returncode != 0 or not listed:
        return None
    return {"version": listed[0][0], "gpus": [name for _, name in listed]}


def _backends(problem: Problem) -> dict[str, Any]:
    """What each backend has against a problem, and which one "auto" is."""
    return {
        "problem": str(problem),
        "auto": plan(problem).backend,
        "all": [
            {
                "name": backend.name,
                "available": not backend.why_not(problem),
                "why_not": list(backend.why_not(problem)),
                "why_named_only": list(backend.why_named_only(problem)),
            }
            for backend in BACKENDS
        ],
    }


def _backend_text(backend: dict[str, Any], auto: str) -> str:
    if not backend["available"]:
        return f"not available: {'; '.join(backend['why_not'])}"
    if backend["why_named_only"]:
        return f"available by name: {'; '.join(backend['why_named_only'])}"
    return 'available, and what "auto" picks' if backend["name"] == auto else "available"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _imported(module: str) -> dict[str, str | None]:
    """The version of a module that can be imported, or why it cannot."""
    if find_spec(module) is None:
        return {"version": None, "why_not": "not installed"}
    try:
        return {"version": str(getattr(import_module(module), "__version__", "version unknown")), "why_not": None}
    except Exception as error:  # an extension built for another torch or CUDA may raise anything
        return {"version": None, "why_not": f"installed, but importing it raises {type(error).__name__}: {error}"}


def _aligned(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of two columns."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:{width}}  {value}" for name, value in rows]


if __name__ == "__main__":
    sys.exit(main())
