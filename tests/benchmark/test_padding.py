"""What padding costs, measured: at a tiny size the benchmark runs on a CPU, and the page shows the results files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from benchmarks.models import padding
from benchmarks.models.llama import TINY
from benchmarks.models.rows import OURS

from stream_attention_tools.bench.results import load, save

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*/padding.json"))


@pytest.fixture(scope="module")
def bench() -> padding.Bench:
    return padding.Bench(padding.SIZES["cpu"]._replace(shape=TINY, length=32), "cpu")


def test_a_share_of_the_batch_is_padding_on_the_right(bench: padding.Bench) -> None:
    for share, asked in (("none", 0.0), ("25 %", 0.25), ("50 %", 0.5)):
        mask = bench.masks[share]
        assert 1 - float(mask.float().mean()) == asked and mask[0].all()
        assert torch.equal(mask, mask.sort(1, descending=True).values)
        visible = torch.ones(32, 32).tril() * mask.unsqueeze(1)
        assert bench.pairs(share) == int(visible.sum())


def test_everybody_is_right_and_timed_in_every_cell(tmp_path: Path) -> None:
    found = padding.measured(padding.SIZES["cpu"]._replace(shape=TINY, length=32), "cpu", 3)
    save(found, tmp_path / "padding.json")
    assert load(tmp_path / "padding.json")["suite"] == "padding"
    assert [cell["name"] for cell in found["cells"]] == _cells()
    for cell in found["cells"]:
        assert set(cell["providers"]) == {OURS, "sdpa", "eager"}
        assert all(one["right"] and one["repeats"] == 3 for one in cell["providers"].values())
        assert cell["fastest_peer"] in ("sdpa", "eager") and cell["ratio"] > 0
    assert len(padding.table(found)) == 7 and padding.markdown(found).count("\n| ") == 7


def test_an_attention_that_ignores_padding_is_wrong(bench: padding.Bench) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def deaf(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value, None, **others | {"is_causal": True})

    exact = padding.copy.deepcopy(bench.model).double()
    transformers.AttentionInterface.register("deaf", deaf)
    transformers.AttentionMaskInterface.register("deaf", transformers.masking_utils.sdpa_mask)
    try:
        for share, right in (("none", True), ("25 %", False)):
            assert bench.verdicts(bench.forward, share, ["deaf"], exact)["deaf"].right == right
    finally:
        padding.choose(bench.model, "sdpa")
        for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
            del interface._global_mapping["deaf"]


def _cells() -> list[str]:
    return [f"{way}, padding {share}" for way in ("forward", "training") for share in ("none", "25 %", "50 %")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_a_results_file_is_whole_and_the_page_shows_it(file: Path) -> None:
    found = load(file)
    assert [cell["name"] for cell in found["cells"]] == _cells()
    for cell in found["cells"]:
        for one in cell["providers"].values():
            assert one["right"] and one["repeats"] >= 20
    page = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
    mark = file.parent.name
    shown = page.partition(f"<!-- padding:{mark} -->\n")[2].partition(f"\n<!-- /padding:{mark} -->")[0]
    command = f"python -m benchmarks.models.padding --show {file.relative_to(ROOT)}"
    assert shown == padding.markdown(found), command


def test_there_is_a_results_file_of_a_cpu() -> None:
    assert "cpu" in {file.parent.name for file in FILES}
