"""What transformers asks before it uses FlashAttention: is it there, of which version, and is there a GPU.

Inside of `install` the answers are yes. Its functions keep their identity, since models have imported them by name:
their code is replaced, and restored. Modules that are imported later are visited then (`imports._Followed`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import unwrap
from typing import Any

IMPORTS = "transformers.utils.import_utils"
FUNCTIONS = "transformers.modeling_flash_attention_utils"
MODELS = "transformers.modeling_utils"
MODULES = frozenset((IMPORTS, FUNCTIONS, MODELS))

_GENERATIONS = {"flash_attn": (2, "flash-attn"), "flash_attn_interface": (3, "flash-attn-3")}
"""Library -> which FlashAttention it is to transformers, and its distribution."""

_LOADED = (
    "_loaded_implementation",
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_pad_fn",
    "_unpad_fn",
    "_process_flash_kwargs_fn",
)
"""Where transformers keeps the functions that it has imported, None before."""

_undone: dict[tuple[str, str], Callable[[], None]] = {}
"""(library, module) -> what restores the module."""


def satisfy(name: str, loaded: str = "") -> None:
    """Make the checks of a library pass in the modules of transformers that are imported, `loaded` just now; again does
    nothing."""
    if name not in _GENERATIONS:
        return
    for module_name, visit in ((IMPORTS, _pass_imports), (FUNCTIONS, _pass_devices), (MODELS, _pass_old_devices)):
        module = sys.modules.get(module_name)
        if (name, module_name) not in _undone and module is not None and (loaded == module_name or _is_whole(module)):
            _undone[name, module_name] = visit(module, *_GENERATIONS[name])


def forget(name: str) -> None:
    """Restore the checks."""
    for key in [key for key in _undone if key[0] == name]:
        _undone.pop(key)()


def _is_whole(module: Any) -> bool:
    """Whether a module is imported, and not in the middle of it."""
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _pass_imports(module: Any, generation: int, distribution: str) -> Callable[[], None]:
    library = "flash_attn" if generation == 2 else "flash_attn_interface"
    check = getattr(module, f"is_flash_attn_{generation}_available")
    plain = unwrap(check)
    code, plain.__code__ = plain.__code__, _yes.__code__
    distributions = getattr(module, "PACKAGE_DISTRIBUTION_MAPPING", {})
    distributions[library] = [*distributions.get(library, []), distribution]
    _clear(module, check)

    def undo() -> None:
        plain.__code__ = code
        distributions[library] = [one for one in distributions[library] if one != distribution]
        _clear(module, check)

    return undo


def _pass_devices(module: Any, generation: int, distribution: str) -> Callable[[], None]:
    matrix = getattr(module, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {})
    before = matrix.get(generation)
    if before is not None:
        matrix[generation] = before | {"supported_devices": (*before["supported_devices"], (_yes, "cuda"))}
    _unload(module)

    def undo() -> None:
        if before is not None:
            matrix[generation] = before
        _unload(module)

    return undo


def _pass_old_devices(module: Any, generation: int, distribution: str) -> Callable[[], None]:
    """transformers 4 has no table of devices: for a model on a CPU it asks for a GPU, or else for an MLU."""
    before = getattr(module, "is_torch_mlu_available", None)
    if before is None or before is _yes:
        return lambda: None
    module.is_torch_mlu_available = _yes

    def undo() -> None:
        module.is_torch_mlu_available = before

    return undo


def _yes(*arguments: Any, **keywords: Any) -> bool:
    return True


def _clear(module: Any, check: Any) -> None:
    """Forget answers that are kept."""
    names = check.__name__, "is_flash_attn_greater_or_equal", "_package_distribution_mapping"
    for name in names:
        getattr(getattr(module, name, None), "cache_clear", lambda: None)()


def _unload(module: Any) -> None:
    for name in _LOADED:
        if hasattr(module, name):
            setattr(module, name, None)
