"""python -m stream_attention.cli.info [--json] [--check]: what is enabled here, and what would enable the rest.

Prints versions, CPU and GPUs, each backend and optional package with "on", or "off", why, and the command that enables
it; and the environment variables that matter, where they are set. --check computes a small causal forward and backward
and compares both with the fp64 reference, within the tolerance of the tests. The exit code is 1 if that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch

from stream_attention import __version__
from stream_attention.backends import BACKENDS, BY_NAME, installed, probe
from stream_attention.backends import self_check as hopper_check
from stream_attention.backends.installed import SEE_INFO, triton_release
from stream_attention.base.device import arch, num_sms
from stream_attention.base.problem import Problem
from stream_attention.dispatch.plan import plan
from stream_attention.integration.hf import OLDEST
from stream_attention.ops.explain import problems_of_call
from stream_attention.ops.fp8 import in_fp8

from ..bench.results import aligned, cpu_name, installed_version
from .command import command

WIDTH = 100
"""Columns of the text. With one GPU and no environment variables it has at most 24 lines."""

WHAT = {
    "gluon": "Hopper kernels",
    "triton": "GPU kernels",
    "eager": "plain PyTorch",
    "reference": "fp64, dense",
    "fp8": 'precision="fp8"',
    "transformers": "Hugging Face models",
    "matplotlib": "reports, MemoryProfiler.plot",
    "pyyaml": "StreamAttentionConfig.from_yaml",
    "rich": "progress of benchmarks",
}
"""Backend or optional package -> what it is, or is for."""

EXTRAS = ("transformers", "matplotlib", "pyyaml", "rich")

PEERS = {"FlashAttention-2": ("flash_attn", "flash-attn"), "FlashAttention-3": ("flash_attn_interface", "flash-attn-3")}
"""Peer of the benchmark -> its module, and the package that brings it."""

VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
PREFIXES = ("STREAM_ATTENTION_", "TRITON_", "NCCL_", "TORCHELASTIC_")
"""Environment variables that change what runs, or where, by name and by how their names begin."""


LARGE = (1, 4096, 32, 128), (1, 4096, 32, 128), torch.bfloat16
"""The call that backends are asked about: shapes of the query and of the keys."""


def _run(options: argparse.Namespace) -> int:
    found = collect(details=options.json or options.check)
    if not options.json:
        print(text(found), flush=True)  # before the self-check, which may end the process
    check = found["check"] = self_check() if options.check else None
    if options.json:
        print(json.dumps(found, indent=1))
    elif check is None:
        print(f"\nTo compare a small call with the fp64 reference: {options.prog} --check")
    else:
        print(f"\n{check_text(check)}")
    return 0 if check is None or check["passed"] else 1


def collect(details: bool = True) -> dict[str, Any]:
    """Everything but the self-check, as JSON holds it; what is absent is None.

    Args:
        details: import the peers and ask NVIDIA's driver, which takes seconds. Otherwise peers are looked up by their
            metadata, and the driver is asked only where torch sees no GPU.
    """
    why_no_gpu = _why_no_gpu()
    forward = _posed(*LARGE)[0]
    driver = _driver() if details or why_no_gpu is not None else None
    return {
        "versions": {
            "stream_attention": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": _cudnn() if details else None,
            "triton": None if find_spec("triton") is None else installed_version("triton") or triton_release(),
        },
        "extras": {package: installed_version(package) for package in EXTRAS},
        "peers": {peer: _peer(*names, details) for peer, names in PEERS.items()},
        "machine": {
            "os": platform.platform(),
            "cpu": cpu_name(),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if why_no_gpu is None else [],
        "why_no_gpu": why_no_gpu,
        "enable_gpu": _enable_gpu(driver),
        "driver": driver,
        "backends": _backends(forward),
        "fp8": _backends(in_fp8(forward)),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name in VARIABLES or name.startswith(PREFIXES)
        },
    }


def self_check() -> dict[str, Any]:
    """Compare a small causal forward and backward on the best device with the fp64 reference, and the Hopper kernels
    with the portable ones where the installed Triton is one that nobody ran them with.

    Returns:
        Whether it passed, in how many seconds (the first time on a GPU, compiling the kernels takes most of them), who
        computed what, and `error` and `allowed` of each result: "out", "lse", "d_query", ... Where it failed,
        `message` has the reason.
    """
    from ..testing.inputs import Case
    from ..testing.tolerance import check_case

    device = _best()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    case = Case(B=1, Tq=96, Tk=160, Hq=4, Hkv=2, D=64, Dv=64, dtype=dtype, device=str(device), causal=True)
    forward, backward = _posed((case.B, case.Tq, case.Hq, case.D), (case.B, case.Tk, case.Hkv, case.D), dtype)
    results: dict[str, dict[str, float]] = {}
    message = None
    large = _posed(*LARGE)
    begun = time.perf_counter()
    asked = {one.kind: hopper_check.answer(one, BY_NAME["gluon"]) for one in large if one.arch == 90}
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
        "hopper": {kind: found.words for kind, found in asked.items() if found},
        "message": message,
    }


def text(found: dict[str, Any]) -> str:
    """What `collect` found, for a reader."""
    versions, machine = found["versions"], found["machine"]
    built = next((f"{name.upper()} {versions[name]}" for name in ("cuda", "hip") if versions[name]), "no CUDA")
    triton = f"Triton {versions['triton']}" if versions["triton"] else "no Triton"
    ours, python = f"stream-attention {versions['stream_attention']}", f"Python {versions['python']}"
    rows = [
        ("os", machine["os"]),
        ("cpu", f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}, torch threads: {machine['threads']}"),
        *_gpu_rows(found),
    ]
    backends = [(one["name"], WHAT[one["name"]], _state(one, found["gpus"])) for one in found["backends"]["all"]]
    with_fp8 = next((one for one in found["fp8"]["all"] if one["available"] and not one["why_named_only"]), None)
    by_triton = next(one for one in found["fp8"]["all"] if one["name"] == "triton")  # on more GPUs than gluon
    fp8 = f"on: {with_fp8['name']}" if with_fp8 else _state(by_triton, found["gpus"])
    extras = [(package, WHAT[package], _extra_state(package, its)) for package, its in found["extras"].items()]
    peers = [(peer, "peer of the benchmark", its["version"] or its["why_not"]) for peer, its in found["peers"].items()]
    environment = " ".join(f"{name}={value}" for name, value in found["environment"].items())
    lines = [
        f"{ours}, {python}, torch {versions['torch']} ({built}), {triton}",
        *_aligned(rows),
        '\nbackends ("auto" takes the first that can do a call)',
        *_aligned([*backends, ("FP8", WHAT["fp8"], fp8)]),
        "\noptional packages",
        *_aligned([*extras, *peers]),
    ]
    if environment:
        wrapped = textwrap.wrap(environment, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
        lines += ["\nenvironment", *(f"  {line}" for line in wrapped)]
    return "\n".join(lines)


def check_text(check: dict[str, Any]) -> str:
    """What `self_check` found, for a reader."""
    who = ", ".join(f"{direction} by {backend}" for direction, backend in check["backends"].items())
    head = f"self-check {'passed' if check['passed'] else 'FAILED'} in {check['seconds']} s, {who}"
    results = check["results"].items()
    rows = _aligned((name, f"error {one['error']:.2e}, allowed {one['allowed']:.2e}") for name, one in results)
    problem = f"  of {check['problem']}"
    rows += [f"  Hopper kernels, {kind}: {words}" for kind, words in check["hopper"].items()]
    return "\n".join([head, problem, *rows, *([] if check["passed"] else [check["message"]])])


def _best() -> torch.device:
    """The best device here."""
    return torch.device("cpu") if _why_no_gpu() else torch.device("cuda", torch.cuda.current_device())


def _posed(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: torch.dtype) -> list[Problem]:
    """A causal forward on the best device, and its backward."""
    device = _best()
    query, key, value = (
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in (q_shape, kv_shape, kv_shape)
    )
    problems, _ = problems_of_call(query, key, value, causal=True)
    return [one.replace(device=device, arch=arch(device), num_sms=num_sms(device)) for one in problems]


def _why_no_gpu() -> str | None:
    """Why torch cannot use a GPU, in its own words; None if it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this build of torch has no CUDA"
    try:
        torch.cuda.init()
        torch.cuda.get_device_properties(torch.cuda.current_device())
    except Exception as error:  # AssertionError, RuntimeError, torch's own types: by build, driver and device
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None


def _enable_gpu(driver: dict[str, Any] | None) -> str | None:
    """The command by which torch gets to see the GPUs that the driver sees; None where no command does it."""
    without_cuda = torch.version.cuda is None and torch.version.hip is None
    if driver is None or not without_cuda or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return None
    return f"pip install --force-reinstall {installed.TORCH}"  # what is installed may have the same number


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


def _gpu_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Equal GPUs share a line. Where torch sees none, why, and what the driver sees."""
    if not found["gpus"]:
        why = textwrap.shorten(found["why_no_gpu"], WIDTH - 13, placeholder=" ...")
        rows = [("gpu", f"none: {why}{_arrow(found['enable_gpu'])}")]
        if found["driver"] is not None:
            rows.append(("driver", f"{found['driver']['version']}, which sees {', '.join(found['driver']['gpus'])}"))
        return rows
    rows = []
    for described, equal in groupby(found["gpus"], _gpu_text):
        numbers = [gpu["index"] for gpu in equal]
        rows.append((f"gpu {numbers[0]}" + (f"-{numbers[-1]}" if len(numbers) > 1 else ""), described))
    return rows


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
        done = subprocess.run(query, capture_output=True, encoding="utf-8", errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    listed = [line.split(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    if done.returncode != 0 or not listed:
        return None
    return {"version": listed[0][0], "gpus": [name for _, name in listed]}


def _backends(problem: Problem) -> dict[str, Any]:
    """What each backend has against a problem, what would enable it, and which one "auto" is, if any. Runs nothing."""
    with probe.only_remembered():
        checked = hopper_check.answer(problem, BY_NAME["gluon"])
        found = [
            {
                "name": backend.name,
                "available": not (why_not := list(backend.why_not(problem))),
                "why_not": why_not,
                "why_named_only": list(backend.why_named_only(problem)),
                "enable": installed.remedy(backend.name, problem) if why_not else None,
                "checked": checked.words if checked and checked.yes and backend.name == "gluon" else None,
            }
            for backend in BACKENDS
        ]
    able = (one["name"] for one in found if one["available"] and not one["why_named_only"])
    return {"problem": str(problem), "auto": next(able, None), "all": found}


def _state(backend: dict[str, Any], gpus: Sequence[Any]) -> str:
    if not backend["available"]:
        why = "; ".join(backend["why_not"]).replace(SEE_INFO, "") if gpus else "no CUDA device"
        return f"off: {why}{_arrow(backend['enable'])}"
    if backend["why_named_only"]:
        return f"on by name: {'; '.join(backend['why_named_only'])}"
    return "on: passed the self-check with this Triton" if backend["checked"] else "on"


def _extra_state(package: str, its: str | None) -> str:
    if its is None:
        return f"not installed{_arrow(f'pip install {package}')}"
    numbers = re.match(r"(\d+)\.(\d+)", its)
    if package == "transformers" and numbers and (int(numbers[1]), int(numbers[2])) < OLDEST:
        least = ".".join(map(str, OLDEST))
        return f"off: expected {least} or newer; found {its}{_arrow('pip install --upgrade transformers')}"
    return its


def _arrow(command: str | None) -> str:
    return "" if command is None else f" -> {command}"


def _peer(module: str, package: str, details: bool) -> dict[str, str | None]:
    """The version of a peer, by its metadata; with `details` of one that can be imported: one that was built for
    another torch is installed and yet not there."""
    if find_spec(module) is None:
        return {"version": None, "why_not": "not installed"}
    try:
        its = getattr(import_module(module), "__version__", None) if details else None
    except Exception as error:  # an extension built for another torch or CUDA may raise anything
        return {"version": None, "why_not": f"installed, but importing it raises {type(error).__name__}: {error}"}
    return {"version": str(its or installed_version(package) or "version unknown"), "why_not": None}


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of columns; a command that would not fit gets a line of its own."""
    lines = [f"  {line}" for line in aligned(list(rows)).splitlines()]
    return [line if len(line) <= WIDTH else line.replace(" -> ", "\n    -> ") for line in lines]


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON, which has more details")
    add("--check", action="store_true", help="compare a small call with the fp64 reference")
    add("--no-check", action="store_true", help=argparse.SUPPRESS)  # what is now the default


main = command("python -m stream_attention.cli.info", __doc__, _flags, _run)

if __name__ == "__main__":
    sys.exit(main())
