"""The package as a user gets it: the wheel, its import, and the README's own words."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IMPORT_BUDGET_S = 0.150  # what `import stream_attention` may add to `import torch`

# The tests that need the wheel share one build, so under pytest-xdist they run in one worker.
needs_wheel = pytest.mark.xdist_group("wheel")


def run(python: Path | str, *args: str, cwd: Path) -> str:
    """Run an interpreter that sees neither this checkout nor the caller's PYTHON* settings; return its stdout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(python), *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(args)[:200]} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def readme_quick_start() -> str:
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert block, "README.md has no ```python block"
    return block.group(1)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="the wheel is built with the `build` package of the dev extra")
    source = tmp_path_factory.mktemp("source")  # a copy: setuptools leaves build/ and *.egg-info beside the sources
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(source / "dist"), cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of a clean environment that holds the wheel, and borrows torch from the environment of the tests."""
    home = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(home, with_pip=False)
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = ("-m", "pip", "--python", str(python))
    run(sys.executable, *pip, "install", "--no-deps", "--no-index", str(wheel), cwd=home)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    # Written after the installation, so that pip does not take our editable install for the one to replace. Paths in a
    # .pth come after the environment's own, and .pth files found there (the editable one) are not followed.
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in sorted(borrowed)))
    return python


# What is in the wheel


@needs_wheel
def test_the_wheel_holds_the_package_its_type_marker_and_the_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".css", ".html", ".typed")]
    missing = {path.relative_to(ROOT / "src").as_posix() for path in sources} - set(names)
    assert not missing
    assert {"stream_attention/py.typed", "stream_attention_tools/py.typed"} <= set(names)
    assert any(re.fullmatch(r"stream_attention-[^/]+\.dist-info/(licenses/)?LICENSE", name) for name in names)
    assert not [name for name in names if name.startswith(("tests/", "examples/", "benchmarks/"))]


@needs_wheel
def test_every_console_script_points_at_a_function_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = (
        "from importlib.metadata import distribution\n"
        "scripts = [e for e in distribution('stream-attention').entry_points if e.group == 'console_scripts']\n"
        "print(sum(callable(e.load()) for e in scripts), len(scripts))"
    )
    loaded, declared = run(installed, "-I", "-c", code, cwd=tmp_path).split()
    assert loaded == declared
    assert int(declared) >= 1


@needs_wheel
def test_the_wheel_installs_by_its_file_name_with_its_extras(wheel: Path, installed: Path, tmp_path: Path) -> None:
    """pip checks what the extras ask for against what the tests' environment has, and asks no index."""
    pip = ("-m", "pip", "--python", str(installed), "install", "--no-index")
    printed = run(sys.executable, *pip, f"{wheel}[hf,bench]", cwd=tmp_path)
    for name in ("torch", "transformers", "matplotlib", "pyyaml", "rich"):
        assert re.search(rf"already satisfied: {name}\b", printed), printed
    wrong = subprocess.run([sys.executable, *pip, f"{wheel}[nonsense]"], capture_output=True, text=True)
    assert "does not provide the extra 'nonsense'" in wrong.stderr + wrong.stdout


# What the README promises


@needs_wheel
def test_the_readme_quick_start_runs_as_pasted_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "quick_start.py"
    script.write_text(readme_quick_start() + "\nimport stream_attention\nprint(stream_attention.__file__)\n")
    printed = run(installed, "-I", str(script), cwd=tmp_path)
    imported_from = Path(printed.strip().splitlines()[-1])
    assert imported_from.is_relative_to(installed.parents[1]), f"not the wheel's copy: {imported_from}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/api.md"])
def test_the_links_to_files_of_this_repository_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not ((ROOT / page).parent / target).exists()] == []


# Lines that tell a reader what to install. No index has this package: it is installed from here, or from a wheel.

PAGES = ("README.md", "CONTRIBUTING.md", "DESIGN.md", "SECURITY.md", "Makefile", "Dockerfile", "cuda/README.md")
TREES = ("docs", "src", "examples", "learn", "benchmarks", ".github")
KINDS = {".py", ".md", ".yml", ".yaml", ".toml", ".sh"}
BY_NAME = re.compile(
    r"""\b(?:pipx?3?|uv|conda|poetry)\b [^\n`]*\b(?:install|add)\b [^\n`]*"""
    r"""(?<=[\s"'=])stream[-_.]attention(?!\S*\.whl)"""
    r"""|\bstream[-_.]attention\[""",
    re.IGNORECASE,
)
HINT = re.compile(r"""pip install (?:--?[\w-]+ )*["']?([A-Za-z][\w-]*)""")


def lines_that_are_read() -> list[tuple[str, str]]:
    """(where, line) of everything that users read, or that a message is made of."""
    paths = [ROOT / name for name in PAGES]
    for tree in TREES:
        paths += [path for path in (ROOT / tree).rglob("*") if path.suffix in KINDS]
    return [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]


def test_no_line_installs_this_package_by_its_name() -> None:
    assert [where for where, line in lines_that_are_read() if BY_NAME.search(line)] == []


def test_every_hint_installs_a_package_that_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    names = {re.match(r"[\w-]+", one)[0] for one in asked} - {project["name"]}
    hints = [(where, found[1]) for where, line in lines_that_are_read() for found in HINT.finditer(line)]
    assert (
        {"torch", "triton", "transformers", "matplotlib", "pyyaml"} <= {name for _, name in hints} <= names | {"dist"}
    )


@pytest.mark.parametrize(
    ("line", "by_name"),
    [
        ('pip install "stream-attention[hf]"', True),
        ("needs transformers: pip install stream_attention", True),
        ("python -m pip install -U stream-attention", True),
        ("uv add stream-attention", True),
        ("Get it as stream-attention[bench].", True),
        ("pip install dist/stream_attention-0.1.0-py3-none-any.whl", False),
        ('pip install "dist/stream_attention-0.1.0-py3-none-any.whl[hf,bench]"', False),
        ("run `pip install .`; `stream-attention info` says what is enabled", False),
        ("from stream_attention import attention", False),
    ],
)
def test_a_line_that_installs_by_name_would_be_noticed(line: str, by_name: bool) -> None:
    assert bool(BY_NAME.search(line)) == by_name


# What the import costs


IMPORTS_TORCH_ALONE = """
import sys
from importlib.machinery import PathFinder

BLOCKED = {"triton", "transformers", "matplotlib", "rich", "yaml", "hypothesis", "pytest", "flash_attn", "accelerate"}

class WithoutThem:  # looks like a machine on which they are not installed, to `import` and to find_spec alike
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            asked.append(name)
            return None
        return PathFinder.find_spec(name, path, target)

asked = []
sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutThem
import torch
asked.clear()  # torch may ask, we may not
before = set(sys.modules)

import stream_attention

assert set(asked) <= {"triton"}, f"the import asked for {asked}"  # is it there: looked up once, never imported
added = set(sys.modules) - before
foreign = {name.partition(".")[0] for name in added} - set(sys.stdlib_module_names) - {"torch", "stream_attention"}
assert not foreign, f"the import brought in {sorted(foreign)}"
prefixes = "backends.triton.kernels", "backends.hopper.kernels", "integration"
lazy = [n for n in added if n.startswith(tuple("stream_attention." + prefix for prefix in prefixes))]
assert not lazy, f"the import brought in {lazy}"

q = torch.randn(1, 5, 2, 8, requires_grad=True)
stream_attention.attention(q, q, q, causal=True).sum().backward()  # and the CPU path needs none of them either
assert q.grad.isfinite().all()
"""


@needs_wheel
def test_import_and_the_cpu_path_need_torch_alone(installed: Path, tmp_path: Path) -> None:
    run(installed, "-I", "-c", IMPORTS_TORCH_ALONE, cwd=tmp_path)


@needs_wheel
@pytest.mark.serial
def test_import_adds_at_most_150_ms_to_importing_torch(installed: Path, tmp_path: Path) -> None:
    code = "import time, torch\nt = time.perf_counter()\nimport stream_attention\nprint(time.perf_counter() - t)"
    run(installed, "-I", "-c", code, cwd=tmp_path)  # writes the .pyc files and warms the disk cache
    seconds = []
    for _ in range(5):  # the best of several: what the import costs, not what else the machine was doing
        seconds.append(float(run(installed, "-I", "-c", code, cwd=tmp_path)))
        if seconds[-1] <= IMPORT_BUDGET_S:
            break
    assert min(seconds) <= IMPORT_BUDGET_S, f"import took {[f'{s * 1e3:.0f} ms' for s in seconds]}"
