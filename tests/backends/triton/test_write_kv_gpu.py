"""Writing tokens to slots on a GPU: the bits of a loop over tokens, in graphs, without synchronisation."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gpu_tools import captured, give_memory_back, keep, without_synchronising
from write_kv_cases import BF16, E4M3, F16, ORDERS, Case, bits, check, draw_case, expected, filled, in_one, memory

from stream_attention import write_kv
from stream_attention.backends.installed import makes_fp8_codes

__all__ = ["give_memory_back"]

pytestmark = pytest.mark.gpu


def of_vllm(stored: torch.dtype, n: int = 64, order: str = "LBNHC", page: int = 16, **scales: Any) -> Case:
    """A call of a model with 8 heads of 128, every fourth token skipped, three rows of padding behind the last."""
    stores = in_one(order, {"L": 2, "B": 2 + n // page, "H": 8, "N": page}, (128, 128), stored)
    slots = torch.randperm((2 + n // page) * page, generator=torch.Generator().manual_seed(0))[:n]
    slots[3::4] = -1
    return Case(*filled((2, n + 3, 8, 128), BF16), *stores, slots, **scales)


# Agreement, token by token


def test_random_calls() -> None:
    count = 80  # each is another kernel to compile
    for seed in range(count):
        check(draw_case(random.Random(seed)), "cuda")
    keep({"calls": count}, "random calls", of="write_kv")


@pytest.mark.parametrize("stored", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("page", [1, 16, 256])
@pytest.mark.parametrize("order", ORDERS)
def test_layouts_of_vllm(order: str, page: int, stored: torch.dtype) -> None:
    for n in (1, 7, 300):
        check(of_vllm(stored, n, order, page), "cuda")


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_number_in_e4m3(dtype: torch.dtype) -> None:
    new = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 8, 128)
    for scale in (None, 0.3, torch.rand(8) + 0.1):
        stores = [filled((len(new), 8, 128), E4M3, seed) for seed in range(2)]
        check(Case(new, new, *stores, torch.randperm(len(new)), scale, 7.0), "cuda")


# Graphs and streams


@pytest.mark.parametrize("stored", [BF16, E4M3], ids=str)
def test_a_graph_writes_to_the_slots_that_there_are_when_it_is_replayed(stored: torch.dtype) -> None:
    scale = {"k_scale": torch.tensor(2.0), "v_scale": torch.rand(8)} if stored is E4M3 else {}
    on_cpu = of_vllm(stored, **scale)
    on_gpu = on_cpu.on("cuda")
    graph, _ = captured(on_gpu.write)
    memory(on_gpu.key_pages).copy_(memory(on_cpu.key_pages))  # as before the calls that were captured
    for step in range(4):
        slots = on_cpu.slots.roll(step)
        new = filled((2, *on_cpu.key.shape), BF16, 10 + step)
        for t, now in zip((on_gpu.key, on_gpu.value, on_gpu.slots), (*new, slots), strict=True):
            t.copy_(now)
        graph.replay()
        on_cpu = expected(on_cpu._replace(key=new[0], value=new[1], slots=slots))
        got, want = memory(on_gpu.key_pages).cpu(), memory(on_cpu.key_pages)
        assert ((bits(got) == bits(want)) | (got.isnan() & want.isnan())).all()


@pytest.mark.parametrize("scale", [None, 0.5, torch.tensor(0.5)], ids=["none", "number", "tensor"])
def test_the_host_never_waits_and_calls_no_operation_of_torch(scale: Any) -> None:
    case = of_vllm(BF16 if scale is None else E4M3, k_scale=scale).on("cuda")
    if scale is not None and not makes_fp8_codes(case.key.device):
        pytest.skip("torch writes e4m3 on GPUs before compute capability 8.9")
    case.write()  # compiles
    with without_synchronising():
        case.write()
    with torch.profiler.profile() as profile:
        case.write()
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any("_write_kernel" in name for name in names) and not any(name.startswith("aten::") for name in names)


def test_a_look_at_the_slots_is_asked_for() -> None:
    case = of_vllm(BF16).on("cuda")
    case.slots[5] = 1 << 40
    check(case.on("cpu"), "cuda")
    with pytest.raises(ValueError, match=r"slots: expected below .* got 1099511627776 at \[5\]"):
        case.write(validate=True)


def test_a_compiled_graph_writes_in_place() -> None:
    def layer(new: Any, pool: Any, slots: Any) -> None:
        write_kv(*(2 * new).unbind(), *pool.transpose(1, 2).split(128, -1), slots)

    pool, slots = torch.zeros(6, 8, 16, 256, dtype=BF16, device="cuda"), torch.tensor([95, -1, 0, 33], device="cuda")
    new = filled((2, 4, 8, 128), BF16).cuda()
    other = pool.clone()
    torch.compile(layer, fullgraph=True)(new, pool, slots)
    layer(new, other, slots)
    assert torch.equal(pool, other) and pool.any()


# Layouts


@pytest.mark.usefixtures("give_memory_back")
def test_pages_of_more_than_2_to_the_31_elements() -> None:
    """bf16 keys and values of 4.3 GB each, of which the last tokens lie behind 2**31."""
    count = 2**17 + 4
    stores = torch.zeros(count, 16, 8, 256, dtype=BF16, device="cuda").split(128, -1)
    new = filled((2, 3, 8, 128), BF16).cuda()
    write_kv(*new, *stores, torch.tensor([16 * count - 1, 5, 16 * count - 40], device="cuda"))
    for store, want in zip(stores, new, strict=True):
        assert torch.equal(store[-1, 15], want[0]) and torch.equal(store[0, 5], want[1])
        assert torch.equal(store[-3, 8], want[2]) and int(torch.count_nonzero(store)) == int(torch.count_nonzero(want))
