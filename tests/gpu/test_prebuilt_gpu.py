"""Machine code that a wheel carries, on a Hopper GPU: the same bits as compiled here, and no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
CALLS = [f"{packed}bf16 d{dim} causal 1x4096" for packed in ("", "packed ") for dim in (64, 128, 256)]

SCRIPT = """
import hashlib, json, sys, time
from pathlib import Path
import torch
leaf = torch.zeros(1, device="cuda", requires_grad=True)  # torch's own first backward imports sympy
torch.autograd.grad(leaf * 2, leaf, torch.ones_like(leaf))
torch.cuda.synchronize()
begun = time.perf_counter()
from stream_attention import attention, varlen_attention
from stream_attention.gpu import prebuilt
prebuilt.FOLDER = Path(sys.argv[1])
digests, seconds = {}, []
for dim in (64, 128, 256):
    for packed in (False, True):
        torch.manual_seed(dim)
        shape = (4096, 2048 // dim, dim) if packed else (1, 4096, 2048 // dim, dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        ends = torch.tensor([0, 4096], device="cuda", dtype=torch.int32)
        lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 4096, "max_seqlen_k": 4096}
        torch.cuda.synchronize()
        if seconds:
            begun = time.perf_counter()
        op = varlen_attention if packed else attention
        out = op(q, k, v, causal=True, deterministic=True, **(lengths if packed else {}))
        torch.cuda.synchronize()
        forward = time.perf_counter() - begun
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.cuda.synchronize()
        seconds.append((forward, time.perf_counter() - begun))
        bits = b"".join(t.detach().view(torch.int16).cpu().numpy().tobytes() for t in (out, *grads))
        digests[f"{dim} {packed}"] = hashlib.sha256(bits).hexdigest()
print(json.dumps({"digests": digests, "seconds": seconds}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a Hopper GPU is needed")
    from tools import prebuild

    made = tmp_path_factory.mktemp("machine_code")
    calls = [call for call in prebuild.common() if call.name in CALLS]
    jobs = prebuild.wanted(calls)
    prebuild.build(made, list(jobs.items()), workers=int(os.environ.get("WORKERS", "0")) or os.cpu_count() or 1)
    return made


def run(folder: Path, tmp_path: Path, prebuilt: bool) -> dict[str, Any]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / f"cache{prebuilt}")}
    environment["STREAM_ATTENTION_PREBUILT"] = "1" if prebuilt else "0"
    if prebuilt:  # nothing to compile with
        environment |= {"PATH": str(tmp_path), "CC": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_results_are_those_of_kernels_compiled_here_and_come_at_once(folder: Path, tmp_path: Path) -> None:
    carried, compiled = run(folder, tmp_path, prebuilt=True), run(folder, tmp_path, prebuilt=False)
    print(carried["seconds"], compiled["seconds"])
    assert carried["digests"] == compiled["digests"]
    assert not list(tmp_path.glob("cacheTrue/*/*.cubin")), "something was compiled"
    forward, both = carried["seconds"][0]
    assert forward <= 1.0 and both <= 1.5, "the first call of the process, with the imports"
