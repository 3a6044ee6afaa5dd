"""Masks: the cases, the checks, a run on the CPU, what the figures say, and the files of the CPU and the H200."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.masks import __main__ as command
from benchmarks.masks import calls as providers
from benchmarks.masks import cases, figures, measure
from benchmarks.workloads.batches import Heads
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from stream_attention import attention, varlen_attention
from stream_attention.masks import causal, padding
from stream_attention_tools.bench.providers.torch_attention import Flex

ROOT = Path(__file__).parents[2]
COMMAND = "python -m benchmarks.masks --fa3 DIR --out benchmarks/results/h200/masks.json"
PACK = tuple(-(-length // 256) for length in cases.PACK)
SMALL = cases.Sizes(2, 96, Heads(4, 2, 16), 20, 7, PACK, Heads(4, 1, 16), 48, 4, 12, torch.float32)
CASES = {case.name: case for case in cases.CASES}
MASKED = [name for name in CASES if "bias" not in name]
MISSED = {"cpu": ["prefix tree, forward", "prefix tree, backward"]}
"""By device: docs/masks.md says why. What is met is taken off the list."""
PACKED = ["documents of 700", "causal pack", "prefix tree", "window 256 in documents of 700"]


def made(name: str, sizes: cases.Sizes = SMALL) -> providers.Made:
    return providers.make(CASES[name].make(sizes, "cpu"), sizes.dtype, "cpu")


def provider(case: providers.Made, name: str, fa3: Any = "not here") -> providers.Provider:
    found = providers.providers(case, fa3)[name]
    assert isinstance(found, providers.Provider), found
    return found


# Cases


def test_the_sizes_are_those_of_the_bars() -> None:
    gpu = cases.SIZES["cuda"]
    assert (gpu.batch, gpu.length, gpu.document, str(gpu.heads)) == (4, 4096, 700, "16/16 d128")
    assert sum(cases.PACK) == 32768 and str(gpu.pack_heads) == "64/8 d128"
    assert (gpu.trunk, gpu.branches, gpu.branch) == (8192, 16, 1024) and gpu.dtype is torch.bfloat16
    cpu = cases.SIZES["cpu"]
    assert sum(cpu.pack) == cpu.trunk + cpu.branches * cpu.branch == cpu.length == 4096
    assert cases.cut(4096, 700) == (700, 700, 700, 700, 700, 596)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_visible_flops_are_those_of_formulas(device: str) -> None:
    s = cases.SIZES[device]
    found = {name: CASES[name].make(s, "cpu") for name in CASES}
    pairs = {name: one.density * one.length**2 for name, one in found.items()}
    assert pairs["documents of 700"] == pytest.approx(5 * 700**2 + 596**2)
    assert pairs["causal pack"] == pytest.approx(sum(n * (n + 1) // 2 for n in s.pack))
    own = s.branch * s.trunk + s.branch * (s.branch + 1) // 2
    assert pairs["prefix tree"] == pytest.approx(s.trunk * (s.trunk + 1) // 2 + s.branches * own)
    assert pairs["bias"] == s.length**2
    tree = found["prefix tree"]
    assert tree.flops == pytest.approx(4 * s.heads.query * s.heads.dim * pairs["prefix tree"])


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_is_the_function_that_flex_attention_gets(name: str) -> None:
    one = CASES[name].make(SMALL, "cpu")
    assert one.mask is not None and one.sees is not None
    sizes = one.batch, one.heads.query, one.length, one.length
    grid = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    seen = one.sees(*grid)
    assert (
        torch.equal(one.mask.as_dense(batch=sizes[0], heads=sizes[1], q_len=one.length, k_len=one.length), seen)
        and seen.any(-1).all()
    )


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_of_the_tokens_of_the_case(name: str) -> None:
    one = CASES[name].make(SMALL, "cpu")
    rows = one.batch * one.length if one.tokens is None else one.tokens.numel()
    assert sum(one.lengths) == rows
    if one.tokens is not None:
        assert one.tokens.unique().numel() == one.length and rows == SMALL.branches * (SMALL.trunk + SMALL.branch)


@pytest.mark.parametrize("name", MASKED)
def test_flex_attention_computes_the_same_from_its_block_mask(name: str) -> None:
    case = made(name)
    block_mask, ms = providers.timed(lambda: providers._block_mask(case.problem, "cpu"), "cpu")
    tensors = providers._tensors(case.query, case.key, case.value)
    with torch.no_grad():
        out = Flex(flex_attention).call(tensors, block_mask=block_mask)
    torch.testing.assert_close(out, attention(case.query, case.key, case.value, mask=case.problem.mask))
    assert ms > 0


# Checks


@pytest.mark.parametrize("name", CASES)
def test_everybody_is_right(name: str) -> None:
    case = made(name)
    for found in providers.providers(case, "not here").values():
        assert isinstance(found, str) or measure.verdict(case, found).right


@pytest.mark.parametrize("name", [*PACKED, "bias with its gradient"])
def test_a_wrong_output_is_found(name: str) -> None:
    case = made(name)
    one = provider(case, "ours")
    for wrong in (lambda out: out * 1.1, lambda out: out + torch.nan, lambda out: out.flip(1)):
        changed = one._replace(attend=lambda *x, wrong=wrong: wrong(one.attend(*x)))
        assert not measure.verdict(case, changed).right


class Doubled(torch.autograd.Function):
    """The same values, and twice the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


@pytest.mark.parametrize("which", range(4))
def test_a_wrong_gradient_is_found(which: int) -> None:
    case = made("bias with its gradient")
    one = provider(case, "ours")

    def attend(*x: Tensor) -> Tensor:
        return one.attend(*(Doubled.apply(tensor) if n == which else tensor for n, tensor in enumerate(x)))

    found = measure.verdict(case, one._replace(attend=attend))
    assert not found.right and found.of == ("d_query", "d_key", "d_value", "d_bias")[which]


@pytest.mark.parametrize("name", ["varlen", "unshared pack"])
def test_a_mask_of_another_problem_is_found(name: str) -> None:
    case = made("causal pack" if name == "varlen" else "prefix tree")
    assert measure.verdict(case, provider(case, name)).right
    wrong = causal() if name == "varlen" else causal() & padding([40])
    other = provider(case, "ours")._replace(attend=lambda *qkv: attention(*qkv, mask=wrong))
    assert not measure.verdict(case, other).right


def test_one_of_ours_that_is_wrong_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.SIZES, "cpu", SMALL)
    monkeypatch.setattr(providers, "varlen_attention", lambda *x, **options: varlen_attention(*x, **options) * 1.1)
    monkeypatch.setattr("sys.argv", ["masks", "--cpu", "--rounds", "3", "--only", "causal pack"])
    assert command.main() == 1
    assert "causal pack: varlen: d_value: error" in capsys.readouterr().err


# FlashAttention-3 in this file is its arguments alone: the ops run on a GPU.


class Ops:
    """Takes what FlashAttention-3's ops take, and computes it with ours."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.backwards = factor, 0

    def _packing(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: options.pop(name) for name in list(options) if name.startswith(("cu_", "max_"))}

    def fwd(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, num_splits: int, **packing: Any
    ) -> tuple[Tensor, Tensor]:
        assert num_splits == 1
        out, lse = varlen_attention(query, key, value, causal=is_causal, return_lse=True, **packing)
        return out * self.factor, lse

    def bwd(self, grad: Tensor, *tensors: Tensor, is_causal: bool, deterministic: bool, **packing: Any) -> None:
        assert not deterministic
        self.backwards += 1
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        with torch.enable_grad():
            out = varlen_attention(*leaves, causal=is_causal, **packing)
        for result, found in zip(tensors[5:], torch.autograd.grad(out, leaves, grad), strict=True):
            result.copy_(found)


@pytest.mark.parametrize("name", ["documents of 700", "causal pack", "prefix tree"])
def test_flash_attention_3_is_given_the_same_problem(name: str) -> None:
    ops = Ops()
    case = made(name, SMALL._replace(dtype=torch.bfloat16))
    assert measure.verdict(case, provider(case, "fa3", ops)).right and ops.backwards == 1
    assert not measure.verdict(case, provider(case, "fa3", Ops(1.1))).right


def test_a_peer_that_is_wrong_or_cannot_compute_a_case_gets_no_time() -> None:
    sizes = SMALL._replace(dtype=torch.bfloat16)
    entries = measure.measure(CASES["causal pack"], sizes, "cpu", Ops(1.1), 3, 1.0, str)["providers"]
    assert entries["fa3"]["unavailable"].startswith("Wrong: fa3: out: error") and "forward" not in entries["fa3"]
    window = providers.providers(made("window 256 in documents of 700", sizes), Ops())
    assert window["fa3"] == "it is called here without a window" and "fa3" not in providers.providers(
        made("padding"), ""
    )
    assert providers.providers(made("causal pack"), Ops())["fa3"] == "it computes in float16 and bfloat16"


# The command


def test_the_whole_script_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "masks.json"
    monkeypatch.setitem(command.SIZES, "cpu", SMALL)
    monkeypatch.setattr("sys.argv", f"masks --cpu --rounds 3 --out {out}".split())
    assert command.main() == 0
    printed = capsys.readouterr()
    found = json.loads(out.read_text())
    assert list(found["cells"]) == list(CASES) and found["machine"]["threads"] == 1
    check_form(found, rounds=3)
    assert all(f"\n{name}  forward ours" in f"\n{printed.err}" for name in CASES)
    assert printed.out == "".join(f"missed: {sentence}\n" for sentence in figures.missed(found))


def check_form(found: dict[str, Any], rounds: int) -> None:
    """Everybody was right before they were timed, as often as the others of a case."""
    for name, cell in found["cells"].items():
        there = {one: entry for one, entry in cell["providers"].items() if "unavailable" not in entry}
        assert {"ours", "plain" if "bias" in name else "dense mask"} <= set(there)
        assert ("varlen" in there or "unshared pack" in there) is (name in PACKED)
        assert 0 < cell["density"] <= 1 and cell["gflop"] > 0 and cell["mask_ms"] > 0
        for one, entry in there.items():
            assert entry["error"] <= entry["allowed"] and entry["peak_bytes"] > 0
            assert (entry["mask_bytes"] > 0) is (one != "plain")
            for direction in measure.DIRECTIONS:
                timed = entry[direction]
                assert 0 < timed["p20_ms"] <= timed["median_ms"] <= timed["p80_ms"] and timed["rounds"] >= rounds
    assert min(found["new_length_ms"]["ours"]) > 0


REFUSED = {
    "--rounds 0": "--rounds: expected at least 1; got 0",
    "--only nothing": "--only: expected words of a case: documents of 700, causal pack",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_call_is_refused_in_words(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["masks", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert REFUSED[words] in capsys.readouterr().err


def test_without_a_gpu_it_says_what_to_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["masks"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main() == 2
    assert "on a CPU: --cpu" in capsys.readouterr().err


# What the figures say


def measured(device: str, name: str, **speeds: float) -> dict[str, Any]:
    """A file with a case in which ours takes 10 ms, and peers, by names with _ for a space, that by a factor."""
    times = {"ours": 10.0} | {peer.replace("_", " "): 10.0 * factor for peer, factor in speeds.items()}
    entries = {one: {direction: {"median_ms": ms} for direction in measure.DIRECTIONS} for one, ms in times.items()}
    for entry in entries.values():
        entry |= {"peak_bytes": 3 << 20, "mask_bytes": 1 << 10}
    machine = {"device": device, "name": "a machine", "threads": 1}
    said = {"commit": {"hash": None, "dirty": None}, "date": "2026-01-01", "versions": {"torch": "2"}}
    cells = {name: {"density": 0.25, "providers": entries}}
    return {**said, "machine": machine, "timing": {"clock": "a clock"}, "cells": cells}


def test_bars_are_by_device_and_direction() -> None:
    assert figures.missed(measured("cuda", "documents of 700", flex=1.6)) == []
    slow = figures.missed(measured("cuda", "documents of 700", flex=1.5, dense_mask=9.0))
    assert slow == ["documents of 700, forward: 1.500 of the speed of flex, the bar is 1.60"]
    assert len(figures.missed(measured("cpu", "documents of 700", dense_mask=1.9))) == 2
    assert figures.missed(measured("cpu", "prefix LM", dense_mask=0.5)) == []
    assert len(figures.missed(measured("cuda", "prefix tree", unshared_pack=3.1))) == 1
    assert "not measured of the speed of fa3" in figures.missed(measured("cuda", "causal pack", varlen=1.0))[0]
    assert figures.missed(measured("cuda", "bias", plain=0.75)) == []
    assert len(figures.missed(measured("cuda", "bias", plain=0.7))) == 1
    learned = "bias with its gradient"
    assert figures.missed(measured("cuda", learned, plain=0.48)) == []
    assert figures.missed(measured("cuda", learned, plain=0.4))[0].startswith(f"{learned}, backward: 0.400")


def test_a_new_length_that_compiles_misses_its_bar() -> None:
    found = measured("cuda", "documents of 700", flex=2.0) | {"new_length_ms": {"ours": [99.0, 3.0]}}
    assert figures.missed(found) == []
    found["new_length_ms"]["ours"][0] = 1800.0
    assert figures.missed(found) == ["a new length: 1800 ms, the bar is 100 ms"]


def test_the_tables_are_written_between_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, file = tmp_path / "page.md", tmp_path / "masks.json"
    page.write_text("before\n<!-- masks -->\nold\n<!-- /masks -->\nafter\n")
    file.write_text(json.dumps(measured("cuda", "documents of 700", flex=1.25, dense_mask=4.0)))
    missing = SimpleNamespace(file=tmp_path / "nowhere.json")
    monkeypatch.setattr(command, "PLACES", {"cuda": figures.Place(file, page, "masks"), "cpu": missing})
    monkeypatch.setattr("sys.argv", ["masks", "--markdown"])
    assert command.main() == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- masks -->\na machine, 1 threads") and "old" not in text
    assert text.endswith("\n<!-- /masks -->\nafter\n")
    assert "| documents of 700 | 25.0% | backward | 10 ms | 40 ms | 12.5 ms | 4.00 |\n" in text
    assert "| documents of 700 | forward | 10 ms | flex | 12.5 ms | 1.25 | 1.60 missed |\n" in text
    assert "| documents of 700 | 3 MiB | 1 KiB | 3 MiB | 1 KiB | 3 MiB | 1 KiB |\n" in text


# The files


@pytest.fixture(params=figures.PLACES)
def place(request: pytest.FixtureRequest) -> figures.Place:
    found = figures.PLACES[request.param]
    if request.param == "cuda" and not found.file.exists():
        pytest.skip(f"no {found.file.relative_to(ROOT)} yet; on the H200: {COMMAND}")
    return found


def test_the_file_has_every_case_and_enough_rounds(place: figures.Place) -> None:
    found = json.loads(place.file.read_text())
    device = found["machine"]["device"]
    assert figures.PLACES[device] == place and list(found["cells"]) == list(CASES)
    check_form(found, rounds=7 if device == "cpu" else 3)
    sizes = cases.SIZES[device]
    for name, cell in found["cells"].items():
        one = CASES[name].make(sizes, "cpu")
        assert (cell["batch"], cell["length"], cell["heads"]) == (one.batch, one.length, str(one.heads))
        assert cell["density"] == pytest.approx(one.density)
        if device == "cuda" and "unavailable" not in (flex := cell["providers"]["flex"]) and name in MASKED:
            assert flex["block_mask_ms"] > 0
    assert device == "cpu" or (found["machine"]["name"] == "NVIDIA H200" and found["seconds"] <= 150)


def test_no_bars_are_missed_but_those_that_a_page_explains(place: figures.Place) -> None:
    found = json.loads(place.file.read_text())
    missed = [sentence.partition(":")[0] for sentence in figures.missed(found)]
    assert missed == MISSED.get(found["machine"]["device"], [])


def test_the_page_shows_the_file(place: figures.Place) -> None:
    text = place.page.read_text()
    assert text == figures.written(text, place.mark, json.loads(place.file.read_text()))
    assert f"<!-- {place.mark} -->" in text


def test_the_page_names_the_bars_of_the_h200() -> None:
    table = figures.PLACES["cuda"].page.read_text().partition("## H200: masks")[2].partition("```")[0]
    for case in cases.CASES:
        for bar in case.bars.get("cuda", ()):
            shown = [f"{least:.2f}" for least in (bar.forward, bar.backward) if least is not None]
            assert "; ".join(shown) in table
