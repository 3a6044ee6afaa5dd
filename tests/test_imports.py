"""Who imports whom: what `import stream_attention` brings in, and that imports point down only (DESIGN, `docs/`)."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from stream_attention.moved import new_name

SRC = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SRC / "stream_attention"
TOOLS = "stream_attention_tools"

LAYERS = (
    # One total order, from the top: a module imports from its own folder and from those below it.
    "__init__",
    "compat",
    "integration",
    "serving",
    "utils",
    "core",
    "distributed",
    "kvcache",
    "ops",
    "dispatch",
    "backends",
    "gpu",
    "masks",
    "base",
    "moved",
)
RANK = {name: -depth for depth, name in enumerate(LAYERS)}

TOOL_LAYERS = (
    # The same of stream_attention_tools.
    ("cli",),
    ("cluster", "report", "tune", "walk"),
    ("baseline",),
    ("module_tools",),
    ("bench",),
    ("memory",),
    ("warmup",),
    ("testing",),
    ("launchers", "offline"),
    ("files",),
)
TOOL_RANK = {name: -depth for depth, layer in enumerate(TOOL_LAYERS) for name in layer}

NAMES_TOOLS = {
    # file -> why it names stream_attention_tools outside of docstrings
    "core/__init__.py": "tells type checkers where the baseline is that users import from it",
    "moved.py": "what moved there is found under its old name",
    "utils/memory.py": "tells type checkers where the instruments are that users import from it",
}

REFERENCE = "stream_attention.backends.reference."


class Import(NamedTuple):
    importer: str  # dotted module
    imported: str  # dotted module, or module.name where that is no module
    line: int
    lazy: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of our own package in a file, relative ones resolved, those for type checkers left out."""
    importer = module_name(path)
    package = importer.split(".") if path.stem == "__init__" else importer.split(".")[:-1]

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(importer, alias.name, child.lineno, lazy)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                source = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    yield Import(importer, f"{source}.{alias.name}", child.lineno, lazy)
            else:
                yield from walk(child, lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    for one in walk(ast.parse(path.read_text()), lazy=False):
        if one.imported.split(".")[0] in (PACKAGE.name, TOOLS) and one.imported != "stream_attention.__version__":
            yield one


def names_tools(source: str) -> list[int]:
    """Lines that import stream_attention_tools, or name it in a string (for import_module) that is no docstring."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            names = [node.value]
        else:
            continue
        found += [node.lineno for name in names if TOOLS in name]
    return found


def part(module: str) -> str:
    """The piece of the package a module belongs to: `ops` for stream_attention.ops.merge, `__init__` for the root."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 and pieces[1] in RANK else "__init__"


ALL = [one for path in sorted(PACKAGE.rglob("*.py")) for one in imports_of(path)]
OF_TOOLS = [one for path in sorted((SRC / TOOLS).rglob("*.py")) for one in imports_of(path)]


# The parser, on itself


def test_the_walk_sees_relative_lazy_and_absolute_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SRC", tmp_path)
    source = tmp_path / "stream_attention" / "ops" / "example.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "import math\n"
        "from ..dispatch import validate\n"
        "from ..backends.eager import Eager\n"
        "from .merge import merge_states\n"
        "if TYPE_CHECKING:\n    from ..core import config\n"
        "def f():\n    import stream_attention.backends.reference.attention\n"
    )
    assert [(one.imported.removeprefix("stream_attention."), one.line, one.lazy) for one in imports_of(source)] == [
        ("dispatch.validate", 2, False),
        ("backends.eager.Eager", 3, False),
        ("ops.merge.merge_states", 4, False),
        ("backends.reference.attention", 8, True),
    ]


# Imports point down


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert parts <= set(RANK), "a new part: give it a place in LAYERS"


def test_imports_point_down_only() -> None:
    upward = [str(one) for one in ALL if RANK[part(one.importer)] < RANK[part(one.imported)]]
    assert upward == []


def test_no_module_imports_the_package_itself() -> None:
    """`from stream_attention import attention` inside the package is an import of the top, and a cycle in waiting."""
    assert [str(one) for one in ALL if part(one.imported) == "__init__" and part(one.importer) != "__init__"] == []


def backend(module: str) -> str:
    """The folder of a backend that a module lies in; "" for others."""
    _, folder, name, *_ = (*module.split("."), "", "")
    return name if folder == "backends" and name and (PACKAGE / folder / name).is_dir() else ""


def test_backends_do_not_import_each_other() -> None:
    """What they share lies below them: in gpu/ and base/."""
    folders = {path.parent.name for path in (PACKAGE / "backends").glob("*/__init__.py")}
    assert folders == {"eager", "hopper", "reference", "triton"}
    inside = [one for one in ALL if backend(one.importer)]
    assert [str(one) for one in inside if backend(one.imported) not in ("", backend(one.importer))] == []


def test_a_backend_imports_no_kernel_until_it_is_used() -> None:
    """Planning works on a machine that lacks what a backend needs."""
    asked = [one for one in ALL if backend(one.importer) and one.importer.count(".") == 2 and not one.lazy]
    tables = tuple(f".{name}" for name in ("tuning", "fp8_tuning", "base", "installed"))
    kernels = [one for one in asked if backend(one.imported) and not one.imported.endswith(tables)]
    assert [str(one) for one in kernels] == []


def test_fast_code_does_not_import_the_reference() -> None:
    importers = [one for one in ALL if one.imported.startswith(REFERENCE)]
    outside = [one for one in importers if not one.importer.startswith("stream_attention.backends")]
    assert {one.importer.removeprefix("stream_attention.") for one in outside} == {
        "ops.attention",  # for backend="reference"
        "ops.fp8",  # likewise, and where no kernel quantises
    }
    assert all(one.lazy for one in outside), "only inside the function that needs it"


# The tools import the library, and it imports none of them


def test_the_library_names_the_tools_only_where_old_names_are_found() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): names_tools(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {name for name, lines in found.items() if lines} == set(NAMES_TOOLS)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import stream_attention_tools.bench", [1]),
        ("def f():\n    from stream_attention_tools import tune", [2]),
        ("if TYPE_CHECKING:\n    from stream_attention_tools.bench.suites import Cell", [2]),
        ("x = 1\nimport_module('stream_attention_tools.bench')", [2]),
        ("import_module(f'stream_attention_tools.{name}')", [1]),
        ("'stream_attention_tools.tune proposes rows.'\n# stream_attention_tools\nimport stream_attention", []),
    ],
)
def test_a_name_of_the_tools_would_be_noticed(source: str, lines: list[int]) -> None:
    assert names_tools(source) == lines


def test_the_tools_import_no_old_name() -> None:
    """They would warn their users of what these did not write."""
    assert [str(one) for one in OF_TOOLS if new_name(one.imported)] == []


def test_the_tools_import_downwards_only() -> None:
    inside = [one for one in OF_TOOLS if one.imported.split(".")[0] == TOOLS]
    found = [(TOOL_RANK[one.importer.split(".")[1]], TOOL_RANK[one.imported.split(".")[1]], one) for one in inside]
    assert len(found) > 50
    assert [str(one) for importer, imported, one in found if importer < imported] == []


# What the import brings in

PROBE = """
import json, sys
import torch
before = set(sys.modules)
import stream_attention
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def added() -> list[str]:
    """The modules that `import stream_attention` adds to those of `import torch`, in a fresh process."""
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


def test_the_import_brings_in_no_other_package(added: list[str]) -> None:
    roots = {name.partition(".")[0] for name in added}
    assert "stream_attention" in roots
    assert roots - set(sys.stdlib_module_names) - {"torch", "stream_attention"} == set()


def test_the_import_brings_in_no_kernel_and_no_extra(added: list[str]) -> None:
    parts = {name.split(".")[1] for name in added if name.startswith("stream_attention.")}
    assert {"ops", "dispatch", "backends", "base"} <= parts
    assert not parts & {"gpu", "integration", "distributed"} - {"gpu"}
    assert not [name for name in added if name.endswith((".kernels", ".blocked", ".launch", "_sm90"))]


@pytest.mark.parametrize("kernels", ["triton", "hopper"])
def test_the_kernels_do_not_import_torch_dynamo(kernels: str) -> None:
    """It takes 2 s, which every first call on a GPU would wait."""
    pytest.importorskip("triton")
    probe = f"import sys, stream_attention.backends.{kernels}.kernels; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False", done.stderr
