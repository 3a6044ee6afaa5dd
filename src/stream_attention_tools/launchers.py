"""The C modules that Triton 3.6 and 3.7 build when a kernel is first launched, built ahead and without a driver.

One serves the whole process; with 3.6 there is another for each signature. They name the driver's library and are
linked against one that is empty: its symbols are looked up when the module is loaded, where the driver is.
"""

from __future__ import annotations

import subprocess
import sysconfig
from hashlib import sha256
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from triton.backends.nvidia import driver
from triton.runtime.build import _build, platform_key
from triton.runtime.cache import get_cache_manager

_LIBRARY = "libcuda.so.1"


def why_not() -> str | None:
    """Why none can be built ahead; None if they can."""
    if not hasattr(driver, "compile_module_from_src"):  # from 3.8 on
        return (
            f"Triton {triton.__version__} has one C module for all kernels and looks for it by the folder of the CUDA "
            "driver, so the first launch of a machine builds it, once"
        )
    if which("gcc") is None:
        return "there is no gcc"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "there is no Python.h"
    return None


class Module(NamedTuple):
    """What Triton builds, and the name under which it looks for it in its cache."""

    code: str
    name: str

    @property
    def file(self) -> str:
        return f"{self.name}{sysconfig.get_config_var('EXT_SUFFIX')}"

    @property
    def cache(self) -> Any:
        return get_cache_manager(sha256((self.code + platform_key()).encode("utf-8")).hexdigest())


def missing(compiled: Any) -> list[Module]:
    """Of the modules that a compiled kernel is launched with, those that Triton's cache does not have."""
    modules = [Module(Path(driver.dirname, "driver.c").read_text(), "cuda_utils")]

    def note(src: str, name: str, **how: Any) -> Any:
        modules.append(Module(src, name))
        return SimpleNamespace(launch=None)

    if hasattr(driver, "make_launcher"):  # 3.6
        with patch.multiple(driver, compile_module_from_src=note, library_dirs=list):
            driver.CudaLauncher(compiled.src, compiled.metadata)
    return [module for module in modules if module.cache.get_file(module.file) is None]


def build(module: Module) -> None:
    """Build a module into Triton's cache."""
    with TemporaryDirectory() as folder:
        code, library = Path(folder, f"{module.name}.c"), Path(folder, _LIBRARY)
        code.write_text(module.code)
        empty = ["gcc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{_LIBRARY}", "-o", str(library)]
        subprocess.run(empty, check=True, capture_output=True, text=True)
        # Needed although it gives no symbol: some linkers would drop it.
        link = ["-Wl,--no-as-needed", f"-L{folder}", f"-l:{_LIBRARY}"]
        built = _build(module.name, str(code), folder, [], driver.include_dirs, [], link)
        module.cache.put(Path(built).read_bytes(), module.file, binary=True)
