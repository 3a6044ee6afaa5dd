"""install(): imports of another attention library find its functions here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from ..base.errors import refuse
from . import transformers_checks


class Library(NamedTuple):
    """A library whose imports can be made to find ours."""

    distribution: str
    ours: str  # the module of this folder that has its version
    modules: dict[str, str]  # its modules -> those of this folder, whose public names they have; "" for none

    @property
    def version(self) -> str:
        """That of the library whose functions these are, and who they are."""
        found: str = _ours(self.ours).__version__
        return found


LIBRARIES = {
    "flash_attn": Library(
        "flash-attn",
        "flash_attn",
        {
            "flash_attn": "flash_attn",
            "flash_attn.flash_attn_interface": "flash_attn",
            "flash_attn.bert_padding": "bert_padding",
        },
    ),
    "flash_attn_interface": Library(
        "flash-attn-3", "flash_attn_interface", {"flash_attn_interface": "flash_attn_interface"}
    ),
    "xformers": Library(
        "xformers",
        "xformers",
        {
            "xformers": "",
            "xformers.ops": "xformers",
            "xformers.ops.fmha": "xformers",
            "xformers.ops.fmha.attn_bias": "attn_bias",
        },
    ),
}


FUNCTIONS = {
    "sdpa": ("torch.nn.functional", "scaled_dot_product_attention"),
    "flex": ("torch.nn.attention.flex_attention", "flex_attention"),
}
"""Functions of torch that can be replaced: the module of each, by the module of this folder that has ours."""


def _ours(name: str) -> Any:
    return import_module(f"{__package__}.{name}")


class Installed:
    """What `install` changed; `undo()`, or the end of a `with` block, restores it."""

    def __init__(self, undo: Any = None) -> None:
        self._undo = undo

    @property
    def active(self) -> bool:
        """Whether this call changed something that is not restored yet."""
        return self._undo is not None

    def undo(self) -> None:
        """Restore what was there before; again does nothing. What was imported meanwhile keeps our functions."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Installed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def install(name: str, *, replace: bool = False) -> Installed:
    """Make imports of a library find our functions, until `undo()` of what is returned, or the end of a `with` block.

    Where the library is installed, nothing changes unless `replace` is set. Its version is "2.8.3+stream.attention" and
    transformers' checks of version and device pass, so that `attn_implementation="flash_attention_2"` and
    "flash_attention_3" run, also on a CPU.

    Args:
        name: "flash_attn", "flash_attn_interface" or "xformers"; or "sdpa" or "flex", which replace
            `torch.nn.functional.scaled_dot_product_attention` and
            `torch.nn.attention.flex_attention.flex_attention`. What was imported by `from` before stays as it is.
        replace: also where the library itself is installed.

    Raises:
        ValueError: another name.

    >>> from stream_attention.compat import install
    >>> with install("flash_attn"):
    ...     from flash_attn import flash_attn_func
    ...     import flash_attn
    >>> flash_attn.__version__, flash_attn_func.__module__
    ('2.8.3+stream.attention', 'stream_attention.compat.flash_attn')
    """
    if name in FUNCTIONS:
        return _replace_function(name)
    if name not in LIBRARIES:
        refuse("name", f"one of {', '.join([*LIBRARIES, *FUNCTIONS])}", repr(name))
    if _finder_of(name) is not None or (not replace and _is_there(name)):
        return Installed()
    before = {module: sys.modules.pop(module) for module in _modules_of(name)}
    finder = _Finder(name)
    sys.meta_path.insert(0, finder)
    invalidate_caches()
    transformers_checks.satisfy(name)

    def undo() -> None:
        sys.meta_path.remove(finder)
        for module in _modules_of(name):
            del sys.modules[module]
        sys.modules.update(before)
        invalidate_caches()
        transformers_checks.forget(name)

    return Installed(undo)


def _replace_function(name: str) -> Installed:
    """Put one of ours in the place of a function of torch."""
    of, function = FUNCTIONS[name]
    module, ours = import_module(of), getattr(_ours(name), function)
    theirs = getattr(module, function)
    if theirs is ours:
        return Installed()
    setattr(module, function, ours)
    return Installed(lambda: setattr(module, function, theirs))


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # a module that was made by hand
        return True


def _modules_of(name: str) -> list[str]:
    return [module for module in sys.modules if module == name or module.startswith(f"{name}.")]


def _finder_of(name: str) -> _Finder | None:
    return next((one for one in sys.meta_path if isinstance(one, _Finder) and one.name == name), None)


class _Finder(DistributionFinder, Loader):
    """Finds the modules of a library, and what `importlib.metadata` is asked about it."""

    def __init__(self, name: str) -> None:
        self.name, self.library = name, LIBRARIES[name]

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in transformers_checks.MODULES:
            return _followed(fullname, path)
        if fullname not in self.library.modules:
            return None
        ours = f"{__package__}.{self.library.modules[fullname]}"
        return ModuleSpec(fullname, self, origin=ours, is_package=bool(self._children(fullname)))

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if ours := self.library.modules[name]:
            real = _ours(ours)
            module.__doc__ = real.__doc__
            module.__dict__.update({public: getattr(real, public) for public in real.__all__}, __all__=real.__all__)
        module.__version__ = self.library.version  # type: ignore[attr-defined]
        for child in self._children(name):
            import_module(child)

    def _children(self, name: str) -> list[str]:
        return [module for module in self.library.modules if module.rpartition(".")[0] == name]

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        asked = getattr(context, "name", None)
        if asked is None or asked.lower().replace("_", "-") == self.library.distribution:
            yield _Metadata(self.name)


class _Metadata(Distribution):
    """The name and version of a library, and the module that it has."""

    def __init__(self, name: str) -> None:
        library = LIBRARIES[name]
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {library.distribution}\nVersion: {library.version}\n",
            "top_level.txt": f"{name}\n",
        }

    def read_text(self, filename: Any) -> str | None:
        return self._texts.get(str(filename))

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


class _Followed(Loader):
    """A loader after which a module's checks are satisfied."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for name in LIBRARIES:
            if _finder_of(name) is not None:
                transformers_checks.satisfy(name, module.__name__)


def _followed(fullname: str, path: Any) -> ModuleSpec | None:
    found = PathFinder.find_spec(fullname, path)
    if found is not None and found.loader is not None:
        found.loader = _Followed(found.loader)
    return found
