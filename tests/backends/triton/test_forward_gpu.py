"""The Triton forward on a GPU: random problems within what is earned, and what only a device can show."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_tools import BF16, F16, F32, captured, give_memory_back, keep, normal, qkv, without_synchronising
from random_problems import Drawn, draw, run_all

from stream_attention import attention, explain, varlen_attention
from stream_attention.backends.reference import attention as reference
from stream_attention_tools.testing import Case, check_case, peak_bytes

__all__ = ["give_memory_back"]

pytestmark = pytest.mark.gpu

INF = math.inf


def ours(*tensors: Tensor, **options: Any) -> Any:
    return attention(*tensors, **options, backend="triton")


def assert_earned(out: Tensor, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
    """Where a call is not a `Case`: the error is at most twice that of eager torch in the same dtype, plus rounding."""
    exact, _ = reference.attention(query, key, value, **options)
    eager, _ = reference.attention(query, key, value, **options, compute_dtype=query.dtype)
    allowed = 2 * (eager.double() - exact).abs().max() + torch.finfo(out.dtype).eps * exact.abs().max()
    error = (out.double() - exact).abs().max()
    assert error <= allowed, f"{error:.3e} of {allowed:.3e} allowed"


# What is compiled, once, in parallel and before anything runs

BASE = Case(B=2, Tq=200, Tk=300, Hq=4, Hkv=2, D=64, Dv=64, dtype=BF16, device="cuda", causal=True, backward=False)
DECODE = replace(BASE, B=1, Tq=1, Tk=20_000, Hq=8, Hkv=1)
PACKED = replace(BASE, lengths_q=(100, 200), lengths_k=(100, 200))
USED = (
    BASE,
    replace(BASE, dropout_p=0.5),
    replace(BASE, dtype=F32),
    replace(BASE, Hkv=4),
    replace(BASE, Hkv=4, layout="offset"),
    replace(BASE, B=1, Tq=2000, Tk=4096),
    DECODE,
    replace(DECODE, dropout_p=0.5),
    replace(DECODE, Hq=1, Hkv=1, Tk=512),
    PACKED,
    replace(PACKED, dropout_p=0.5),
)
"""The kernels of the tests below that are not cases themselves."""
LAYOUT_CASES = [replace(case, dtype=dtype, layout="offset") for case in (BASE, DECODE) for dtype in (F16, BF16, F32)]
DIM_CASES = [
    replace(BASE, D=dim, Dv=dim, dtype=dtype, B=1) for dim in (8, 16, 96, 192, 256) for dtype in (F16, BF16, F32)
]
LONG_DECODE = replace(DECODE, Tk=100_000, Hkv=2, D=128, Dv=128)
DECODE_CASES: dict[str, Case] = {
    "one query": LONG_DECODE,
    "a batch": replace(LONG_DECODE, B=3, Tk=33_333),
    "one head per KV head": replace(LONG_DECODE, Hq=2, Tk=50_001),
    "speculative queries": replace(LONG_DECODE, Tq=5, Tk=30_000),
    "every modifier": replace(
        LONG_DECODE, Tk=20_001, sink=True, softcap=20.0, alibi="H", window=(15_000, 0), mask=(1, 8, 1, 20_001),
        aux_dtype=F32,
    ),
    "dropout": replace(LONG_DECODE, Tk=20_000, dropout_p=0.3),
    "fp32": replace(LONG_DECODE, Tk=20_000, dtype=F32),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def drawn() -> Drawn:
    fixed = [*USED, *LAYOUT_CASES, *DIM_CASES, *DECODE_CASES.values()]
    return draw(problems=2000, templates=40, variants=150, also=fixed, backward=False)


# Random problems


def test_random_problems_agree_within_what_is_earned(drawn: Drawn) -> None:
    summary = run_all(drawn)
    keep(summary, "random problems", of="forward")
    assert not summary["failed"], "\n\n".join(summary["failures"])


@pytest.mark.parametrize("case", DIM_CASES, ids=lambda case: f"d{case.D} {str(case.dtype)[6:]}")
def test_head_dims_at_the_ends_of_the_range(case: Case) -> None:
    check_case(case, "triton")


def test_the_same_call_twice_is_bit_equal() -> None:
    """The first call goes through Triton's own launch, the second through ours."""
    query, key, value = qkv(Tq=333, Tk=555)
    options = {"causal": True, "dropout_p": 0.2, "seed": 3, "return_lse": True}
    first, second = (ours(query, key, value, **options) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


# CUDA graphs


@pytest.mark.parametrize(
    "shape",
    [{}, {"Tq": 1, "Tk": 20_000, "Hq": 8, "Hkv": 1}, {"dtype": F32}],
    ids=["long", "split", "fp32"],
)
def test_a_graph_replays_with_new_inputs(shape: dict[str, Any]) -> None:
    static = qkv(**shape)
    graph, result = captured(lambda: ours(*static, causal=True, return_lse=True))
    for seed in (10, 20):
        for n, tensor in enumerate(static):
            tensor.copy_(normal(*tensor.shape, seed=seed + n, dtype=tensor.dtype))
        graph.replay()
        out, lse = ours(*static, causal=True, return_lse=True)
        assert torch.equal(result[0], out) and torch.equal(result[1], lse)


def test_a_graph_replays_with_another_seed() -> None:
    static, seed = qkv(), torch.tensor([1, 2], device="cuda")
    graph, result = captured(lambda: ours(*static, causal=True, dropout_p=0.5, seed=seed))
    seen = []
    for pair in ([1, 2], [1, 3], [4, 2], [1, 2]):
        seed.copy_(torch.tensor(pair))
        graph.replay()
        assert torch.equal(result, ours(*static, causal=True, dropout_p=0.5, seed=torch.tensor(pair, device="cuda")))
        seen.append(result.clone())
    assert torch.equal(seen[0], seen[3])
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def test_a_graph_that_draws_its_own_seed_draws_another_at_each_replay() -> None:
    static = qkv()
    graph, result = captured(lambda: ours(*static, causal=True, dropout_p=0.5))
    graph.replay()
    first = result.clone()
    graph.replay()
    assert not torch.equal(first, result)


def test_a_packed_call_is_captured_when_the_lengths_are_told() -> None:
    query, key, value = (t[0] for t in qkv(B=1, Tq=200, Tk=200))
    offsets = torch.tensor([0, 50, 50, 180], dtype=torch.int32, device="cuda")

    def call() -> Tensor:
        return varlen_attention(
            query, key, value, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=200, max_seqlen_k=200,
            causal=True, backend="triton",
        )  # fmt: skip

    graph, result = captured(call)
    for ends in ([0, 50, 50, 180], [0, 1, 200, 200]):
        offsets.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        assert torch.equal(result, call())
        first = slice(ends[0], ends[1])
        assert_earned(result[None, first], *(t[None, first] for t in (query, key, value)), causal=True)


# Devices, streams and the host


def test_a_device_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, and torch.cuda.device_count() is 1")
    query, key, value = qkv()
    there = [t.to("cuda:1") for t in (query, key, value)]
    for options in ({"causal": True}, {"causal": True, "dropout_p": 0.2, "seed": 1}):
        for _ in range(2):
            out = ours(*there, **options)
            assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
            torch.cuda.synchronize(1)
            assert torch.equal(out.to("cuda:0"), ours(query, key, value, **options))


@pytest.mark.parametrize(
    "shape", [{"Tq": 1000, "Tk": 1000}, {"Tq": 1, "Tk": 30_000, "Hq": 8, "Hkv": 1}], ids=["long", "split"]
)
def test_two_streams_at_once(shape: dict[str, Any]) -> None:
    inputs = [qkv(**shape), tuple(t.flip(1).contiguous() for t in qkv(**shape))]
    options = {"dropout_p": 0.1, "seed": torch.tensor([1, 2], device="cuda"), "causal": True} if shape["Tq"] > 1 else {}
    expected = [ours(*tensors, **options) for tensors in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    found: list[list[Tensor]] = [[], []]
    for _ in range(30):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[n].append(ours(*inputs[n], **options))
    torch.cuda.synchronize()
    for n in range(2):
        assert all(torch.equal(out, expected[n]) for out in found[n])


@pytest.mark.parametrize("seed", ["drawn", "int", "tensor", "no dropout"])
@pytest.mark.parametrize("kind", ["dense", "split", "packed"])
def test_no_host_synchronisation(kind: str, seed: str) -> None:
    seeds: dict[str, dict[str, Any]] = {
        "drawn": {"dropout_p": 0.1},
        "int": {"dropout_p": 0.1, "seed": 5},
        "tensor": {"dropout_p": 0.1, "seed": torch.tensor([1, 2], device="cuda")},
        "no dropout": {},
    }
    options = seeds[seed] | {"causal": True, "backend": "triton"}
    query, key, value = qkv(Tq=1, Tk=5000, Hq=8, Hkv=1) if kind == "split" else qkv(Tq=300)
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")

    def call() -> Tensor:
        if kind != "packed":
            return attention(query, key, value, **options)
        return varlen_attention(
            query[0], key[0], value[0], cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=200, max_seqlen_k=200,
            **options,
        )  # fmt: skip

    call()  # compiles
    with without_synchronising():
        out = call()
    assert out.isfinite().all()


# Layouts


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: f"{case.Tq} queries {str(case.dtype)[6:]}")
def test_pointers_that_are_aligned_to_their_dtype_alone(case: Case) -> None:
    check_case(case, "triton")


def test_one_tensor_one_element_into_its_storage() -> None:
    query, key, value = qkv()
    buffer = torch.full((key.numel() + 1,), math.nan, dtype=BF16, device="cuda")
    shifted = buffer[1:].view(key.shape).copy_(key)
    assert shifted.data_ptr() % 16 == 2
    assert_earned(ours(query, shifted, value, causal=True), query, key, value, causal=True)


def test_odd_strides() -> None:
    tensors, views = qkv(Hkv=4), []
    for tensor in tensors:
        batch, rows, heads, dim = tensor.shape
        width = dim + 3
        buffer = torch.full((batch * (rows * heads * width + 7) + 5,), math.nan, dtype=BF16, device="cuda")
        strides = (rows * heads * width + 7, heads * width, width, 1)
        views.append(buffer.as_strided(tensor.shape, strides, 5).copy_(tensor))
    assert_earned(ours(*views, causal=True), *tensors, causal=True)


# Sizes beyond 16 and 32 bits


def test_more_batches_times_heads_than_a_grid_dimension_holds(give_memory_back: None) -> None:
    for shape in ({"B": 8193, "Hq": 9, "Hkv": 9}, {"B": 70_000, "Hq": 1, "Hkv": 1}):
        query, key, value = qkv(Tq=16, Tk=16, **shape)
        out, lse = ours(query, key, value, causal=True, return_lse=True)
        some = [0, 4000, shape["B"] - 1]
        assert_earned(out[some], query[some], key[some], value[some], causal=True)
        expected = reference.attention(query[some], key[some], value[some], causal=True)[1]
        torch.testing.assert_close(lse[some], expected.float())
        assert out.isfinite().all()


def test_more_sequences_than_a_grid_dimension_holds(give_memory_back: None) -> None:
    sequences, length = 70_000, 8
    query, key, value = (t[0] for t in qkv(B=1, Tq=sequences * length, Tk=sequences * length, Hq=2, Hkv=1))
    offsets = torch.arange(0, sequences * length + 1, length, dtype=torch.int32, device="cuda")
    out = varlen_attention(
        query, key, value, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=length, max_seqlen_k=length,
        causal=True, backend="triton",
    )  # fmt: skip
    folded = [t.unflatten(0, (sequences, length)) for t in (query, key, value)]
    some = [0, 40_000, sequences - 1]
    assert_earned(out.unflatten(0, (sequences, length))[some], *(t[some] for t in folded), causal=True)
    assert out.isfinite().all()


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
def test_rows_and_batches_further_apart_than_32_bits(aligned: bool, give_memory_back: None) -> None:
    """Query, key and value are slices of one buffer of more than 2**31 elements, 4.3 GB."""
    rows, dim, stride = 512, 64, 2**22 + 2**14
    buffer = torch.empty(rows * stride, dtype=BF16, device="cuda")
    start = 0 if aligned else 1
    views = [buffer.as_strided((1, rows, 1, dim), (0, stride, dim, 1), start + n * dim) for n in range(3)]
    apart = qkv(B=1, Tq=rows, Tk=rows, Hq=1, Hkv=1, D=dim)
    for view, tensor in zip(views, apart, strict=True):
        view.copy_(tensor)
    assert (rows - 1) * stride >= 2**31
    assert_earned(ours(*views, causal=True), *apart, causal=True)
    if aligned:
        assert_earned(ours(views[0][:, -1:], *views[1:]), apart[0][:, -1:], *apart[1:])

    batches = [
        buffer.as_strided((3, 100, 2, dim), (2**30, 2 * dim, dim, 1), start + n * 100 * 2 * dim) for n in range(3)
    ]
    apart = qkv(B=3, Tq=100, Tk=100, Hq=2, Hkv=2, D=dim)
    for view, tensor in zip(batches, apart, strict=True):
        view.copy_(tensor)
    assert_earned(ours(*batches, causal=True), *apart, causal=True)


def test_an_output_of_more_elements_than_32_bits(give_memory_back: None) -> None:
    """8.8 GB: 2**31 elements and more in the query and in the output."""
    length, heads, dim = 2**18 + 2**12, 64, 128
    query = torch.empty(1, length, heads, dim, dtype=BF16, device="cuda").normal_()
    key, value = (normal(1, length, 1, dim, seed=n) for n in range(2))
    assert query.numel() > 2**31
    out, lse = ours(query, key, value, window=(15, 0), causal=True, return_lse=True)
    for begin in (0, length // 2, length - 64):
        first = max(0, begin - 15)
        rows = slice(begin, begin + 64)
        seen = query[:, rows], key[:, first : begin + 64], value[:, first : begin + 64]
        assert_earned(out[:, rows], *seen, window=(15, 0))
        torch.testing.assert_close(lse[..., rows], reference.attention(*seen, window=(15, 0))[1].float())


def test_a_mask_of_more_elements_than_32_bits(give_memory_back: None) -> None:
    q_len, k_len = 4096, 2**19 + 64
    query, key, value = qkv(B=1, Tq=q_len, Tk=k_len, Hq=1, Hkv=1)
    mask = torch.zeros(1, 1, q_len, k_len, dtype=torch.bool, device="cuda")
    mask[..., ::1001] = True
    mask[:, :, -1] = False
    mask[:, :, -2, -5:] = True
    assert mask.numel() > 2**31
    out, lse = ours(query, key, value, mask=mask, return_lse=True)
    last = {"mask": mask[:, :, -4:]}
    assert_earned(out[:, -4:], query[:, -4:], key, value, **last)
    torch.testing.assert_close(lse[..., -4:], reference.attention(query[:, -4:], key, value, **last)[1].float())
    assert not out[:, -1].any() and lse[0, 0, -1] == -INF


# Precision


def test_fp32_is_exact_unless_tf32_is_allowed() -> None:
    query, key, value = qkv(dtype=F32)
    exact, _ = reference.attention(query, key, value, causal=True)
    allowed = torch.backends.cuda.matmul.allow_tf32
    errors = {}
    try:
        for tf32 in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            errors[tf32] = (ours(query, key, value, causal=True).double() - exact).abs().max().item()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    assert_earned(ours(query, key, value, causal=True), query, key, value, causal=True)
    assert 50 * errors[False] < errors[True] < 1e-2, errors


# Few queries, many keys


@pytest.mark.parametrize("name", DECODE_CASES)
def test_split_keys(name: str) -> None:
    case = DECODE_CASES[name]
    query, key, value = qkv(case.B, case.Tq, case.Tk, case.Hq, case.Hkv, case.D, case.dtype)
    planned = explain(query, key, value, causal=True, dropout_p=case.dropout_p, backend="triton")
    assert planned.config.num_splits > 1
    check_case(case, "triton")


# torch.compile, memory


def test_auto_takes_triton_and_compiles_in_one_graph() -> None:
    query, key, value = qkv()
    assert explain(query, key, value, causal=True).backend == "triton"
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(query, key, value), attention(query, key, value, causal=True) * 2)


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.1, "seed": 1}], ids=["plain", "dropout"])
def test_memory_is_what_is_returned(options: dict[str, Any], give_memory_back: None) -> None:
    """65,536 tokens: the scores of one head alone would be 8.6 GB."""
    tokens, heads, dim = 65_536, 8, 64
    query, key, value = qkv(B=1, Tq=tokens, Tk=tokens, Hq=heads, Hkv=heads // 2, D=dim)
    ours(query, key, value, causal=True, **options)
    returned = tokens * heads * (2 * dim + 4)
    words = 2 * 4 * tokens * heads if "dropout_p" in options else 0
    peak = peak_bytes(lambda: ours(query, key, value, causal=True, **options), "cuda")
    assert peak <= returned + words + 2**20


def test_memory_of_splits_does_not_grow_with_the_keys(give_memory_back: None) -> None:
    def peak(keys: int) -> int:
        query, key, value = qkv(B=1, Tq=1, Tk=keys, Hq=8, Hkv=1)
        ours(query, key, value)
        return peak_bytes(lambda: ours(query, key, value), "cuda")

    assert peak(1_000_000) <= peak(100_000) + 2**16 <= 4 * 2**20
