"""The path as a whole: every step has its parts, every link leads somewhere, every table is what the files say."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from .outputs import ROOT, results

LEARN = ROOT / "learn"
NAMES = (
    "01_gpu_basics 02_triton_basics 03_softmax 04_online_softmax 05_blocked_attention 06_flash_forward "
    "07_causal 08_backward 09_tuning 10_decode 11_ring 12_hopper"
).split()
PAGES = ["README.md", "languages.md", "claims.md", *(f"{name}/README.md" for name in NAMES)]
ENDING = ["What changed", "What it cost", "What it gained", "When not to use it", "In production"]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A program that lies in learn/ itself, by name."""
    monkeypatch.syspath_prepend(str(LEARN))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"learn_{name}", LEARN / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", (LEARN / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def words(page: str) -> str:
    return " ".join((LEARN / page).read_text().split())


# Every step has its parts


def test_the_steps_are_those_of_the_index_and_in_its_order() -> None:
    assert sorted(path.parent.name for path in LEARN.glob("*/README.md")) == NAMES
    assert re.findall(r"^\| \[\d+\. [^]]+\]\((\w+)/README\.md\)", prose("README.md"), re.MULTILINE) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_step_has_a_text_a_program_an_exercise_a_checker_and_a_test(name: str) -> None:
    files = {path.name for path in (LEARN / name).iterdir()}
    assert {"README.md", "exercise.py", "solution.py", "check.py"} <= files
    programs = [
        file for file in files if file.endswith(".py") and file not in ("exercise.py", "solution.py", "check.py")
    ]
    assert programs and any(f"python learn/{name}/{file}" in words(f"{name}/README.md") for file in programs)
    assert f"python learn/{name}/check.py" in words(f"{name}/README.md")
    assert (ROOT / "tests" / "learn" / f"test_{name}.py").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_text_is_short_and_ends_with_what_to_keep(name: str) -> None:
    text = (LEARN / name / "README.md").read_text()
    assert text.startswith(f"# {int(name[:2])}. ") and len(text.splitlines()) <= 150
    ending = text.partition("## What to keep\n")[2]
    assert re.findall(r"^- \*\*(.+?)\*\*: ", ending, re.MULTILINE) == ENDING
    production = ending.partition("**In production**")[2]
    assert re.search(r"\]\(\.\./\.\./src/stream_attention/[\w/]+\.py\)", production)


# Every page leads somewhere


@pytest.mark.parametrize("page", PAGES)
def test_links_and_commands_lead_somewhere(page: str) -> None:
    targets = [
        target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in target
    ]
    assert [target for target in targets if not (LEARN / page).parent.joinpath(target).exists()] == []
    commands = re.findall(r"python (learn/[\w/]+\.py)", (LEARN / page).read_text())
    assert [file for file in commands if not (ROOT / file).exists()] == []
    results_named = re.findall(r"`(benchmarks/results/[\w/.-]+)`", prose(page))
    assert [file for file in results_named if not (ROOT / file).exists() and "claims" not in file] == []


@pytest.mark.parametrize("page", PAGES)
def test_fences_say_what_they_are_and_nothing_shouts(page: str) -> None:
    text = (LEARN / page).read_text()
    assert set(re.findall(r"^```(.*)\n(?:.*\n)*?```$", text, re.MULTILINE)) <= {"bash", "python", "text"}
    assert re.findall("[\U0001f300-\U0001faff\u2600-\u27bf]", text) == []


def test_what_the_course_before_had_is_in_the_index() -> None:
    there = [line.split(" | ")[0] for line in prose("README.md").splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`([^`]+)`", " ".join(there)))
    files = {"FlashAttentionTriton.py", "FlashAttention/FlashAttention.md", "FlashAttention/FlashAttentionBlocked.py"}
    files |= {"Triton/Triton.md", "Triton/vec_add.py", "CUDA/CUDA.md", "CUDA/vec_add.cu", "CUDA/matrix_AddMul.cu"}
    commands = {"python Triton/vec_add.py", "python FlashAttentionTriton.py", "nvcc -o vec_add vec_add.cu", "./vec_add"}
    assert files | commands | {"cd CUDA/", "pip install torch triton numpy"} <= named


# CUDA, Triton and Gluon


def test_lines_are_counted(tool: Any) -> None:
    count = tool("count_lines")
    head = '"""Text."""\n\nimport x  # why\n\n\n'
    body = '@jit\ndef f(a):\n    """More\n    text."""\n    # why\n    return """a\nb"""\n'
    code, device = count.python_lines(head + body)
    assert code == {3, 6, 7, 11, 12} and device == {6, 7, 11, 12}
    head = "// a\n/* b\n c */\n\nint n;  // d\n"
    body = "__device__ int f() {\n    // e\n    return 1;\n}\nint g() {\n    return 2;\n}\n"
    code, device = count.cuda_lines(head + body)
    assert code == {5, 6, 8, 9, 10, 11, 12} and device == {6, 8, 9}


def test_the_table_of_languages_is_that_of_the_files(tool: Any) -> None:
    rows = tool("count_lines").table()
    page = (LEARN / "languages.md").read_text().partition("<!-- lines -->\n")[2].partition("\n<!-- /lines -->")[0]
    shown = page.splitlines()
    assert [row for row in shown if row.startswith("| CUDA")], "the page has a row for CUDA"
    if not (ROOT / "cuda").exists():
        shown = [row for row in shown if not row.startswith("| CUDA")]
    assert shown == rows, "write it anew: python learn/count_lines.py --write"


def test_the_excerpts_are_in_the_kernels() -> None:
    page = (LEARN / "languages.md").read_text()
    excerpts = re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    backends = ROOT / "src" / "stream_attention" / "backends"
    sources = [
        [ROOT / "cuda" / "src" / "flash_bf16.cu"],
        [backends / "triton" / "forward.py", backends.parent / "gpu" / "tiles.py"],
        [backends / "hopper" / "forward_consumer.py"],
    ]
    assert len(excerpts) == 3
    for excerpt, files in zip(excerpts, sources, strict=True):
        if not files[0].exists():  # the CUDA project, if it is not here
            continue
        lines = {line.strip() for file in files for line in file.read_text().splitlines()}
        assert [line for line in excerpt.splitlines() if line.strip() not in lines] == []


def test_the_factor_of_gluon_is_that_of_the_results() -> None:
    of = [cell["providers"]["triton"]["vs_ours"] for cell in results("forward")["cells"]]
    assert f"a factor of {min(of):.1f} to {max(of):.1f}" in words("languages.md")
    (cell,) = (cell for cell in results("forward")["cells"] if cell["name"] == "d128 full 8192")
    assert (cell["problem"]["B"], cell["problem"]["Hq"]) == (2, 16) and "batch 2, 16 heads" in words("languages.md")


# The kernels of the steps on an H200


def lesson(length: int, **ms: float) -> dict[str, Any]:
    named = {name.replace("_", " "): one for name, one in ms.items()}
    return {"length": length, "dim": 64, "ms": named, "tflops": {name: 100 / one for name, one in named.items()}}


def test_the_tables_of_the_lessons_are_those_of_the_file(tool: Any) -> None:
    lessons = tool("measure_lessons")
    tables = lessons.tables(results("lessons")) if lessons.FILE.exists() else {"06": "", "12": ""}
    for name, path in lessons.PAGES.items():
        text = path.read_text()
        assert lessons.page(text, tables[name]) == text, "write it anew: python learn/measure_lessons.py --page"
        assert "has not been" not in text and "gpu_tests_learn.json" in text
    if not lessons.FILE.exists():
        pytest.skip("no lessons.json yet; on the H200: python3 learn/measure_lessons.py")


def test_a_table_has_every_length_and_who_was_measured(tool: Any) -> None:
    lessons = tool("measure_lessons")
    found = {
        "machine": {"name": "a GPU"},
        "versions": {"torch": "2.0"},
        "date": "2026-11-18T00:00:00Z",
        "06": [lesson(512, this_kernel=0.25, triton=0.2, sdpa_flash=0.5)],
        "12": [lesson(16384, in_order=1.0, pinned=0.5, gluon=0.25)],
    }
    tables = lessons.tables(found)
    assert tables["06"].splitlines()[-1] == "| 512 | 0.250 | 0.200 | 0.500 |"
    assert tables["12"].splitlines()[-3:] == [
        "| length | in order | pinned | `gluon` |",
        "|---|---|---|---|",
        "| 16384 | 100 | 200 | 400 |",
    ]
    text = "before\n<!-- measured -->\nold\n<!-- /measured -->\nafter\n"
    assert lessons.page(text, "new") == text.replace("old", "new")


def test_a_wrong_kernel_is_not_timed(tool: Any) -> None:
    lessons, attend = tool("measure_lessons"), torch.nn.functional.scaled_dot_product_attention
    inputs = tuple(torch.randn(3, 2, 80, 2, 16))
    q, k, v = (x.transpose(1, 2) for x in inputs)
    row = lessons.timed({"right": lambda: attend(q, k, v).transpose(1, 2)}, inputs, repeats=3)
    assert row["errors"]["right"] < 1e-5
    assert row["tflops"]["right"] == pytest.approx(4 * 2 * 2 * 80 * 80 * 16 / row["ms"]["right"] / 1e9)
    with pytest.raises(AssertionError, match="wrong, so not timed: off"):
        lessons.timed({"off": lambda: 1.1 * attend(q, k, v).transpose(1, 2)}, inputs, repeats=3)


# The claims


def test_the_tables_of_claims_are_those_of_the_files(tool: Any) -> None:
    page = (LEARN / "claims.md").read_text()
    assert tool("measure_claims").page(page) == page, "write it anew: python learn/measure_claims.py --page"


def test_what_the_page_says_of_claims_is_what_was_measured() -> None:
    text = words("claims.md")
    on_gpu = results("claims")
    fp32, bf16 = (row["peak_bytes"]["streaming"] / 1e6 for row in on_gpu["memory"])
    assert f"holds {bf16:.2f} MB a head in bf16, {fp32:.2f} in fp32" in text
    ways: dict[str, dict[int, float]] = {"forward": {}, "forward+backward": {}}
    for row in on_gpu["speed"]:
        ways[row["direction"]][row["length"]] = row["speedup"]
    forward = {n: round(speedup) for n, speedup in ways["forward"].items()}
    spans = [[forward[n] for n in lengths] for lengths in ((256, 512), (1024, 2048, 4096), (8192, 16384))]
    below, middle, above = (f"{min(span)}-{max(span)}" for span in spans)
    assert f"{below} times below 1024 tokens" in text and f"{middle} from there to 4096, {above} above" in text
    both = ways["forward+backward"].values()
    assert f"With the backward it is {min(both):.0f}-{max(both):.1f} times" in text
    cells = json.loads((ROOT / "benchmarks/results/cpu/cpu.json").read_text())["cells"]
    by_name = {one["name"]: 1 / one["ratio"] for one in cells if one["direction"] == "forward"}
    ratios = {f"{by_name[f'plain {length} fp32']:.1f}" for length in (2048, 8192)}
    assert ratios == {"2.9"} and "2.9 times as fast at 2048 tokens and at 8192 alike" in text


def test_the_claim_of_memory_is_measured_here_too(tool: Any) -> None:
    """By real allocations: standard attention holds the matrix twice, streaming about its output."""
    (row, _) = tool("measure_claims").memory("cpu", length=1024)
    matrix, held = row["matrix_bytes"], row["peak_bytes"]
    assert matrix == 1024 * 1024 * 4 and 2 * matrix <= held["standard"] < 2.1 * matrix
    assert held["streaming"] < matrix / 4


def test_both_ways_that_are_compared_are_right(tool: Any) -> None:
    claims = tool("measure_claims")
    errors = claims.check(*claims.inputs("cpu", torch.float32, 2, 80, 2))
    assert errors.keys() == {"standard", "streaming"} and max(errors.values()) < 1e-5
    assert claims.backend_of(claims.inputs("cpu", torch.float32, 1, 16, 1)).startswith("eager")


@pytest.mark.parametrize("file", ["cpu", "h200"])
def test_a_file_of_claims_says_what_was_run(file: str) -> None:
    path = ROOT / "benchmarks" / "results" / file / "claims.json"
    if not path.exists():
        assert file == "h200" and "not measured yet" in words("claims.md")
        pytest.skip("not measured on the H200 yet")
    found = json.loads(path.read_text())
    assert {"commit", "date", "versions", "machine", "timing"} <= found.keys()
    assert all(row["speedup"] > 0 and row["ran"] for row in found["speed"])
    assert Path(path).parent.name == file and found["machine"]["device"] == {"cpu": "cpu", "h200": "cuda"}[file]
