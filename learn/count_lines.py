"""Counts the lines of the same forward in three languages, for learn/languages.md.

    python learn/count_lines.py                 prints the table
    python learn/count_lines.py --write         writes it into learn/languages.md

A line counts if there is code on it: no blank lines, no comments, no docstrings. Those of the device are in functions
that the GPU runs. `--cuda DIR` says where the CUDA project is, if not in cuda/.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from os.path import relpath
from pathlib import Path

import measured

from stream_attention_tools.files import write_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from tools.count_lines import code_lines  # noqa: E402  in the repository's root, which a script has to add

PAGE = ROOT / "learn" / "languages.md"
GLUON = "src/stream_attention/backends/hopper/"
TRITON = "src/stream_attention/backends/triton/"
FILES = {
    "CUDA": ("cuda/src/flash_bf16.cu", "cuda/src/hardware.cuh"),
    "Triton": (TRITON + "forward.py", "src/stream_attention/gpu/tiles.py"),
    "Gluon": (
        GLUON + "forward_sm90.py",
        *(
            GLUON + f"{name}.py"
            for name in ("forward_consumer", "pipeline", "scheduler", "parameters", "tiles", "versions")
        ),
    ),
    "Triton, step 06": ("learn/06_flash_forward/flash.py",),
    "Gluon, step 12": ("learn/12_hopper/flash_gluon.py",),
}
LESSONS = measured.H200 / "lessons.json"
CELL = "d128 full 8192"
PROVIDERS = {"Triton": "triton", "Gluon": "gluon"}


def python_lines(text: str) -> tuple[set[int], set[int]]:
    """Numbers of the lines with code, and of those in functions for the device."""
    code = code_lines(text)
    device: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list):
            device |= set(range(node.decorator_list[0].lineno, (node.end_lineno or node.lineno) + 1))
    return code, device & code


def cuda_lines(text: str) -> tuple[set[int], set[int]]:
    """The same of CUDA C++."""
    bare = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    lines = [re.sub(r"//.*", "", line) for line in bare.splitlines()]
    code = {number for number, line in enumerate(lines, 1) if line.strip()}
    device: set[int] = set()
    inside = False
    for number, line in enumerate(lines, 1):
        inside = inside or "__device__" in line or "__global__" in line
        if inside:
            device.add(number)
            inside = not line.startswith("}")  # functions stand at the left margin, and so does their last brace
    return code, device & code


def count(path: Path) -> tuple[int, int]:
    """Lines of code in a file, and of those the ones for the device."""
    of = python_lines if path.suffix == ".py" else cuda_lines
    code, device = of(path.read_text())
    return len(code), len(device)


def speed(language: str) -> str:
    if language == "CUDA":
        rows = {row["name"]: row for row in measured.results("cuda")["rows"]}
        return f"{rows['bf16 d128 8k, ring']['single_tflops']:.0f}"
    if language not in PROVIDERS:
        return _lesson(language)
    cells = {cell["name"]: cell["providers"] for cell in measured.results("forward")["cells"]}
    return f"{cells[CELL][PROVIDERS[language]]['tflops']:.0f}"


def _lesson(language: str) -> str:
    """Of a kernel of a step: 06 on the problem of the others, 12 on its longest; "" where none was measured."""
    if not LESSONS.exists():
        return ""
    if language == "Triton, step 06":
        (speed,) = (row["tflops"]["this kernel"] for row in measured.results("lessons")["06"] if row["length"] == 8192)
    else:
        speed = measured.results("lessons")["12"][-1]["tflops"]["pinned"]
    return f"{speed:.0f}"


def table(cuda: Path = ROOT) -> list[str]:
    """Rows of the page; without those of CUDA where its files are not there."""
    lines = ["| | file | lines of code | of the device | with what it shares | TFLOP/s on an H200 |", "|---" * 6 + "|"]
    for language, files in FILES.items():
        paths = [(cuda if name.startswith("cuda/") else ROOT) / name for name in files]
        if not all(path.exists() for path in paths):
            continue
        counts = [count(path) for path in paths]
        link = f"[`{files[0]}`]({relpath(files[0], 'learn')})"
        shared = sum(total for total, _ in counts) if len(counts) > 1 else ""
        lines.append(f"| {language} | {link} | {counts[0][0]} | {counts[0][1]} | {shared} | {speed(language)} |")
    if LESSONS.exists():
        row = measured.results("lessons")["12"][-1]
        what = f"has one head of {row['dim']} and {row['length']} tokens"
        file = "[`lessons.json`](../benchmarks/results/h200/lessons.json)"
        lines += ["", f"The speed of steps 06 and 12 is from {file}; step 12 {what}."]
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", type=Path, default=ROOT, help="the folder that has cuda/ in it")
    parser.add_argument("--write", action="store_true", help="write the table into languages.md")
    flags = parser.parse_args(argv)
    rows = table(flags.cuda)
    if not flags.write:
        print("\n".join(rows))
        return
    before, begin, rest = PAGE.read_text().partition("<!-- lines -->\n")
    write_file(PAGE, before + begin + "\n".join(rows) + "\n<!-- /lines -->" + rest.partition("<!-- /lines -->")[2])


if __name__ == "__main__":
    main()
