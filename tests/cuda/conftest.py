"""The CUDA project of cuda/, built twice: for a CPU by an emulator of CUDA, and by CMake for GPUs.

Both are kept in out/cuda, under a name that changes with their sources, so that a second run builds nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cuda.cuda_library import CudaLibrary

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = Path(__file__).parent / "emulator"
SOURCES = tuple(ROOT / "cuda" / name for name in ("CMakeLists.txt", "include", "src"))


def _built(name: str, sources: tuple[Path, ...], *commands: tuple[str | Path, ...]) -> Path:
    """The folder that `commands` have built, in which "{}" stands for it; workers that want the same wait for it."""
    of = hashlib.sha256()
    for path in sorted(path for source in sources for path in (source, *source.rglob("*")) if path.is_file()):
        of.update(path.name.encode() + path.read_bytes())
    folder = ROOT / "out" / "cuda" / f"{name}-{of.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            for command in commands:
                words = [str(word).replace("{}", str(folder)) for word in command]
                ran = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                assert ran.returncode == 0, f"{' '.join(words)}\n{ran.stdout}"
            (folder / "done").touch()
    return folder


def _emulated(name: str, *defines: str) -> Path:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs a C++ compiler: neither $CXX nor g++ is here")
    return _built(name, (*SOURCES, EMULATOR), (EMULATOR / "build.sh", "{}", *defines))


@pytest.fixture(scope="session")
def emulated_folder() -> Path:
    """libflash_attn.so and dist_flash_attn for the CPU: the sources of cuda/, the kernels thread by thread."""
    return _emulated("emulated")


@pytest.fixture(scope="session")
def single_buffered_folder() -> Path:
    """The same with copies that nothing overlaps."""
    return _emulated("emulated-single-buffer", "-DFLASH_ATTN_DOUBLE_BUFFER=0")


@pytest.fixture(scope="session")
def built_folder() -> Path:
    """The same for GPUs, by CMake and nvcc; warnings and spills are errors. `FLASH_ATTN_BUILD` names a ready one."""
    if named := os.environ.get("FLASH_ATTN_BUILD"):
        return Path(named).resolve()
    for tool in ("nvcc", "cmake"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs nvcc and cmake: {tool} is not here")
    configure = ("cmake", "-S", ROOT / "cuda", "-B", "{}", "-DFLASH_ATTN_STRICT=ON")
    return _built("gpu", SOURCES, configure, ("cmake", "--build", "{}", "--parallel", str(os.cpu_count())))


@pytest.fixture
def emulated(emulated_folder: Path) -> Callable[..., CudaLibrary]:
    """`emulated(seed, late)`: the library, with that order of threads and streams, and late or early copies."""
    path = emulated_folder / "libflash_attn.so"

    def settled(seed: int = 0, late: bool = True) -> CudaLibrary:
        ctypes.CDLL(str(path)).emulator_settle(seed, late)
        return CudaLibrary(path)

    return settled


@pytest.fixture
def emulator(emulated_folder: Path) -> Iterator[ctypes.CDLL]:
    """Its C functions, those of the library among them. What is wrong with its device is right again afterwards."""
    library = ctypes.CDLL(str(emulated_folder / "libflash_attn.so"))
    library.flash_attn_last_error.restype = ctypes.c_char_p
    library.emulator_allocate.restype = ctypes.c_void_p
    yield library
    library.emulator_chip(90, 90, 227 << 10)
    library.emulator_fail(-1)
