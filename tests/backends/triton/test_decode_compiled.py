"""The decode kernels for GPUs that are not here: what is planned for them, and what the compiler makes of it."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from compile_gate import FULL, RELEASE, beyond, with_tables
from sass_gate import as_file, fingerprint, ran, warn_if_not_run

from stream_attention import ContiguousKV, PagedKV, quantize_kv
from stream_attention.backends import BY_NAME
from stream_attention.backends.triton.decode import prepare_decode
from stream_attention.base.kv_layouts import KVCache
from stream_attention.base.kv_layouts.quantized_tensor import Coding
from stream_attention.base.problem import KV, DecodeInputs, Hardware, Operands, Problem, Scores, Shape, Window
from stream_attention.gpu.decode_tuning import INVARIANT_KEYS, DecodeConfig, configure, workspace_numbers
from stream_attention.ops.decode import decode_problem
from stream_attention_tools.testing.offline import compiling_for, disassemble, report

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 120: 99 << 10}
NUM_SMS = {80: 108, 86: 84, 90: 132, 120: 170}


def gpu(problem: Problem, arch: int = 90) -> Problem:
    return problem.replace(device=torch.device("cuda"), arch=arch, num_sms=NUM_SMS[arch])


def problem(batch: int, keys: int, heads: tuple[int, int] = (32, 8), dim: int = 128, **facts: Any) -> Problem:
    """One query per row, bf16, on a Hopper."""
    h200 = Hardware(torch.device("cuda"), 90, NUM_SMS[90])
    return Problem(Shape(batch, 1, *heads, dim, dim), KV("cache", keys), Operands(BF16), h200).replace(**facts)


# Plans


@pytest.mark.parametrize(
    ("stated", "splits"),
    [
        (problem(1, 8192), 16),
        (problem(1, 131072), 16),
        (problem(8, 32768), 2),
        (problem(64, 8192), 1),
        (problem(16, 16384, (8, 1), 256), 8),
        (problem(1, 64), 1),
        (problem(1, 0), 1),
    ],
    ids=str,
)
def test_splits_fill_the_gpu_and_no_more(stated: Problem, splits: int) -> None:
    config = configure(stated, None, False)
    assert config.num_splits == splits and not config.split_keys


def test_a_batch_invariant_plan_does_not_know_the_batch() -> None:
    plans = {configure(problem(batch, 32768), None, True) for batch in (1, 2, 7, 64, 300)}
    assert len(plans) == 1
    (plan,) = plans
    assert (plan.num_splits, plan.split_keys) == (32768 // INVARIANT_KEYS, INVARIANT_KEYS)


def test_a_window_needs_no_more_splits_than_it_has_keys() -> None:
    assert configure(problem(1, 131072, left=99), None, False).num_splits == 1
    assert configure(problem(1, 131072, left=4999), None, True).num_splits == 3


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("page", [0, 16])
def test_what_is_in_flight_fits_into_shared_memory(arch: int, dim: int, page: int) -> None:
    """Keys and values of all stages but the one that is being waited for."""
    for batch, keys, invariant in ((1, 8192, False), (8, 32768, False), (64, 1024, False), (8, 32768, True)):
        config = configure(problem(batch, keys, dim=dim, page=page, arch=arch), None, invariant)
        in_flight = max(1, config.num_stages - 1) * config.block_n * 2 * dim * 2
        assert in_flight + 14_000 <= (227 << 10 if arch in (90, 100) else 99 << 10), config


def test_fp8_is_left_to_plain_torch_where_no_instruction_converts_it() -> None:
    coding = Coding("fp8", 64, True, False, torch.float16, 192, True, True)
    (reason,) = BY_NAME["triton"].why_not(problem(1, 8192, coding=coding, arch=86))
    assert reason == "an fp8 cache requires compute capability 8.9 or newer; got 8.6"
    assert BY_NAME["triton"].why_not(problem(1, 8192, coding=coding)) == ()


def test_more_splits_than_blocks_are_not_made() -> None:
    config = configure(problem(1, 8192), 65536, False)
    assert config.num_splits == 8192 // config.block_n


def test_a_workspace_has_room_for_any_window() -> None:
    for batch in (1, 2, 3, 9):
        for keys in (700, 8192, 16384, 100_000):
            for span in (1, 300, keys // 2, keys // 2 + 1, keys - 1):
                for heads, dim in (((8, 2), 128), ((32, 8), 64), ((8, 1), 256)):
                    whole = problem(batch, keys, heads, dim)
                    needs = [
                        workspace_numbers(one, configure(one, None, False))
                        for one in (whole.replace(left=span - 1), whole)
                    ]
                    assert needs[0] <= needs[1], (whole, span)


# What the compiler makes of them


class Compiled(NamedTuple):
    """A call of the gate, of two rows on 1024 tokens."""

    arch: int = 90
    dim: int = 128
    heads: tuple[int, int] = (32, 8)
    q_len: int = 1
    page: int = 0
    codes: str | None = None
    keys: str = "channel"
    group: int = 64
    dtype: torch.dtype = BF16
    modified: bool = False
    ragged: bool = True
    config: DecodeConfig | None = None  # None: as planned, in three splits

    def cache(self) -> KVCache:
        kv_heads = self.heads[1]
        lengths = torch.full((2,), 1000, dtype=torch.int32)
        rows = torch.zeros(2, 2, 1024, kv_heads, self.dim, dtype=self.dtype)
        cache: ContiguousKV | PagedKV = ContiguousKV(*rows, lengths if self.ragged else None)
        if self.page:
            pages = torch.zeros(2, 2048 // self.page, self.page, kv_heads, self.dim, dtype=self.dtype)
            cache = PagedKV(*pages, torch.zeros(2, 1024 // self.page, dtype=torch.int32), lengths)
        return cache if self.codes is None else quantize_kv(cache, self.codes, keys=self.keys, group=self.group)

    def kernels(self) -> tuple[DecodeConfig, list[Any]]:
        """The kernel that computes and the one that merges."""
        query, cache = torch.zeros(2, self.q_len, self.heads[0], self.dim, dtype=self.dtype), self.cache()
        window, scores = Window(100 if self.modified else -1, 0), Scores(0.1, 5.0 if self.modified else 0.0)
        stated = gpu(decode_problem(query, cache, window=window, scores=scores), self.arch)
        config = self.config or configure(stated, None, False)._replace(num_splits=3)
        tree = torch.ones(2, self.q_len, self.q_len, dtype=torch.bool) if self.modified else None
        per_head = torch.zeros(1, self.heads[0]) if self.modified else None
        asked = tree, per_head, None if per_head is None else per_head[0]
        room = torch.zeros(workspace_numbers(stated, config))
        with compiling_for(self.arch) as compiled:
            inputs = DecodeInputs(query, cache, *asked, None, self.ragged, room)
            prepare_decode(stated, inputs, config)(inputs)
        return config, compiled


CALLS = {
    "rows": Compiled(),
    "rows d64": Compiled(dim=64, heads=(16, 2)),
    "rows d256": Compiled(dim=256, heads=(8, 1)),
    "pages of 16": Compiled(page=16),
    "pages of 256": Compiled(page=256),
    "sixteen queries": Compiled(q_len=16),
    "everything": Compiled(page=64, q_len=4, modified=True),
    "sixteen queries d256": Compiled(q_len=16, dim=256),
    "fp32": Compiled(dtype=F32, dim=128),
    "fp32 d256": Compiled(dtype=F32, dim=256),
    "int4": Compiled(codes="int4"),
    "int8": Compiled(codes="int8"),
    "fp8": Compiled(codes="fp8", dtype=F16),
    "int4 in pages": Compiled(codes="int4", page=64),
    "int4 per token": Compiled(codes="int4", keys="token"),
    "int4 d64": Compiled(codes="int4", dim=64, heads=(16, 2)),
    "int4, everything": Compiled(codes="int4", q_len=4, modified=True),
    "int8, sixteen queries": Compiled(codes="int8", q_len=16),
    "rows on an A100": Compiled(arch=80),
    "rows d256 on an A100": Compiled(arch=80, dim=256, heads=(8, 1)),
    "int4 on an A100": Compiled(arch=80, codes="int4"),
    "rows d64 on an A10": Compiled(arch=86, dim=64, heads=(16, 2)),
    "rows on an A10": Compiled(arch=86),
    "rows d256 on an A10": Compiled(arch=86, dim=256, heads=(8, 1)),
    "int8 on an A10": Compiled(arch=86, codes="int8"),
}


SPILLS: dict[str, dict[str, int]] = {
    "3.6": {},
    "3.7": {"everything": 28},
    "3.8": {},
    "3.9": {"rows d256 on an A10": 16},
}
"""Bytes that the kernel that computes is known to spill, by Triton's release."""

MERGES_THAT_SPILL = {("3.8", "rows d256 on an A10")}
"""Releases and calls of which the kernel that merges is known to spill 8 bytes, once for a row."""


@with_tables
@pytest.mark.parametrize("name", CALLS)
def test_the_machine_code_is_as_it_should_be(name: str) -> None:
    call = CALLS[name]
    config, (computing, merging) = call.kernels()
    found = report(computing)
    assert not beyond(found.spill_bytes, SPILLS[RELEASE].get(name, 0))
    assert report(merging).spill_bytes <= (8 if (RELEASE, name) in MERGES_THAT_SPILL else 0)
    assert found.warps == config.num_warps
    assert found.shared_bytes <= SHARED_BYTES[call.arch]
    ops = found.instructions
    assert ops["LDGSTS"] >= 2 * (config.num_stages - 1), "keys and values are copied asynchronously"
    if call.dtype is not F32:
        assert (ops["HMMA"] and ops["LDSM"]) or ops["HGMMA"], "matrix instructions, with operands in their own order"
    ahead = {"ACQBULK"} & set(ops)
    assert bool(ahead) == (call.arch >= 90), "waits for the kernels ahead of it"


# What was measured


def of_suites(dim: int, heads: tuple[int, int], *config: int, **how: Any) -> Compiled:
    """A call of the suites `decode` and `caches`."""
    return Compiled(dim=dim, heads=heads, config=DecodeConfig(*config), ragged=False, **how)


MEASURED = {
    "b1 32/8 d128 8192": of_suites(128, (32, 8), 64, 4, 3, 16),
    "32/8 d128, split": of_suites(128, (32, 8), 128, 4, 3, 2),
    "b64 32/8 d128 8192": of_suites(128, (32, 8), 128, 4, 3, 1),
    "b64 32/8 d128 1024": of_suites(128, (32, 8), 32, 2, 4, 1),
    "b1 32/32 d128 16384": of_suites(128, (32, 32), 128, 4, 3, 4),
    "b16 64/8 d128 16384": of_suites(128, (64, 8), 128, 4, 3, 1),
    "b8 16/2 d64 32768": of_suites(64, (16, 2), 256, 4, 3, 8),
    "b16 8/1 d256 16384": of_suites(256, (8, 1), 64, 4, 3, 8),
    "paged 16": of_suites(128, (32, 8), 64, 4, 4, 4, page=16),
    "paged 64": of_suites(128, (32, 8), 64, 4, 4, 4, page=64),
    "paged 256": of_suites(128, (32, 8), 128, 4, 3, 2, page=256),
    "int4": of_suites(128, (32, 8), 64, 2, 3, 13, codes="int4"),
    "int8": of_suites(128, (32, 8), 32, 1, 4, 17, codes="int8"),
    "fp8": of_suites(128, (32, 8), 32, 1, 4, 17, codes="fp8"),
}


def kernels_of(name: str) -> dict[str, Any]:
    _, kernels = MEASURED[name].kernels()
    does = ("computes", "merges")[: len(kernels)]
    return {f"{name}: {it}": one for it, one in zip(does, kernels, strict=True)}


@with_tables
@pytest.mark.parametrize(
    "name", MEASURED if RELEASE == FULL else ["b1 32/8 d128 8192", "b8 16/2 d64 32768", "paged 16", "int4"]
)
def test_the_machine_code_is_what_was_measured(name: str) -> None:
    its = ran("decode", by="triton")
    for kernel, made in kernels_of(name).items():
        assert not beyond(report(made).spill_bytes, SPILLS[RELEASE].get(kernel, 0)), kernel
        warn_if_not_run(disassemble(made), kernel, its)


if __name__ == "__main__":
    found = {kernel: fingerprint(disassemble(made)) for name in MEASURED for kernel, made in kernels_of(name).items()}
    print(as_file(sys.argv[1], found))
