"""Replaces the attention of existing models by ours, and restores it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import unwrap
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..base.errors import refuse
from ..core.config import StreamAttentionConfig
from .forward import ATTRIBUTE, Settings
from .hf import NAME

REFUSED = ("gradient_checkpointing", "use_qkv_projections", "qkv_bias", "use_layer_norm", "dropout")
"""Fields that the model decides: other values than the defaults would be ignored."""


class Replaced(int):
    """How many attention modules were replaced; `undo()` restores them."""

    _before: list[_Before]
    _made: list[Replaced]  # all of the model that are not undone, in order

    def undo(self) -> None:
        """Restore config and implementation; a second call does nothing. What a later replacement has changed too is
        restored when that one is undone."""
        at = next((n for n, one in enumerate(self._made) if one is self), None)
        if at is None:
            return
        later = {id(what.owner): what for one in reversed(self._made[at + 1 :]) for what in one._before}
        for what in self._before:
            if id(what.owner) in later:
                later[id(what.owner)].value = what.value
            else:
                what.restore()
        del self._made[at]


@dataclass
class _Before:
    """The previous value of a config or a module."""

    owner: Any
    value: Any  # the implementation of a config, the settings of a module

    def restore(self) -> None:
        if isinstance(self.owner, nn.Module):
            _keep(self.owner, self.value)
        else:
            self.owner._attn_implementation = self.value


_made: WeakKeyDictionary[nn.Module, list[Replaced]] = WeakKeyDictionary()


def replace(model: nn.Module, config: StreamAttentionConfig, named: Callable[[str], bool], argument: str) -> Replaced:
    """Replace the attention modules of a model whose path is `named`; `argument` is the one that names them."""
    if not hasattr(model, "set_attn_implementation"):
        refuse("model", "a model of transformers", type(model).__name__, error=TypeError)
    if not isinstance(config, StreamAttentionConfig):
        refuse("config", "a StreamAttentionConfig", type(config).__name__, error=TypeError)
    found = {path: module for path, module in model.named_modules() if _asks_the_interface(module)}
    chosen = {path: module for path, module in found.items() if named(path)}
    if not chosen:
        there = ", ".join(sorted({path.rpartition(".")[2] for path in found})) or "none in this model"
        refuse("model", f"attention modules {argument} that use transformers' attention interface", there)
    shared = {id(module.config) for module in chosen.values()}
    left_out = [path for path, module in found.items() if id(module.config) in shared and path not in chosen]
    if left_out:
        hint = "Modules that share a config share their attention: choose all of them."
        refuse(argument.partition(" ")[0], "all attention of the model", f"a choice without {left_out[0]}", hint)
    _check(config, model)
    configs = _configs(model, chosen)
    before = [_Before(one, one._attn_implementation) for one in configs]
    kept = [_Before(module, module.__dict__.get(ATTRIBUTE)) for module in chosen.values()]
    not_chosen = {id(module.config) for path, module in found.items() if path not in chosen}
    try:
        model.set_attn_implementation(NAME)  # type: ignore[operator]
        for one in before:
            if id(one.owner) in not_chosen:
                one.restore()
            elif id(one.owner) in shared:  # of a stack with a config of the model's class, which older versions skip
                one.owner._attn_implementation = NAME
    except BaseException:
        for one in before:
            one.restore()
        raise
    for module in chosen.values():
        _keep(module, Settings(config.backend, config.max_sequence_length))
    replaced = Replaced(len(chosen))
    replaced._before, replaced._made = [*before, *kept], _made.setdefault(model, [])
    replaced._made.append(replaced)
    return replaced


def _asks_the_interface(module: nn.Module) -> bool:
    """Whether a module looks its attention up in transformers' table, by the name in its config."""
    forward = unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return hasattr(module, "config") and code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _configs(model: Any, chosen: dict[str, nn.Module]) -> list[Any]:
    """Each config that may change, once, those of whole models first."""
    holders = [module for module in model.modules() if hasattr(module, "set_attn_implementation")]
    return list({id(one.config): one.config for one in [*holders, *chosen.values()]}.values())


def _keep(module: nn.Module, settings: Settings | None) -> None:
    if settings is None:
        module.__dict__.pop(ATTRIBUTE, None)
    else:
        module.__dict__[ATTRIBUTE] = settings


def _check(config: StreamAttentionConfig, model: Any) -> None:
    """Refuse fields that contradict the model, or that would have no effect."""
    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    dim = getattr(text, "head_dim", None) or getattr(text, "d_kv", None)
    if dim is None and heads is not None and hasattr(text, "hidden_size"):
        dim = text.hidden_size // heads
    for name, expected in (("num_heads", heads), ("head_dim", dim)):
        if expected is not None and getattr(config, name) != expected:
            refuse(name, f"the model's {expected}", getattr(config, name))
    default = StreamAttentionConfig()
    for name in REFUSED:
        if getattr(config, name) != getattr(default, name):
            hint = "The model has its own."
            refuse(name, f"{getattr(default, name)} for a model of transformers", getattr(config, name), hint)
