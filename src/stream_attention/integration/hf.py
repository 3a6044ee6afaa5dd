"""Our attention in models of Hugging Face transformers, 4.56 and newer.

    from stream_attention.integration.hf import register
    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="stream_attention")

or, for an existing model, `replace_llama_attention(model, config)`. No model's code is changed: transformers calls the
attention function (`forward`) and the mask function (`masks`) that are registered under the name in a model's config.
Both are needed: for a name without a mask function it makes no mask at all, not even for padding.

A cache layer of ours (`caches`) returns placeholder keys that carry the cache, which `placeholder.read` reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..base.errors import refuse
from ..core.config import StreamAttentionConfig

if TYPE_CHECKING:
    from .replace import Replaced

NAME = "stream_attention"
"""The `attn_implementation`. A name with "flash" in it would make transformers look for flash-attn."""

OLDEST = (4, 56)


def register() -> None:
    """Make `attn_implementation="stream_attention"` our attention, in this process; again does nothing.

    Raises:
        ImportError: transformers is not installed, or older than 4.56, which passes caches and masks differently.
    """
    _check_version()
    from transformers import AttentionInterface, AttentionMaskInterface

    from .forward import stream_attention_forward
    from .masks import stream_mask

    AttentionInterface.register(NAME, stream_attention_forward)
    AttentionMaskInterface.register(NAME, stream_mask)


def unregister() -> None:
    """Remove the name; models that use it must choose another attention first. Again does nothing."""
    _check_version()
    from transformers import AttentionInterface, AttentionMaskInterface

    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(NAME, None)


def replace_llama_attention(model: Any, config: StreamAttentionConfig, module_name: str = "self_attn") -> Replaced:
    """Replace the attention of a model by ours; Llama and all with `self_attn` (Mistral, Qwen, Gemma, GPT-OSS, ...).

    Weights, projections and rotary embeddings stay the model's. Registers first. A second call changes the config only.

    Args:
        model: a model of transformers, with or without a head.
        config: `num_heads` and `head_dim` must be the model's; the tiles, `enable_flash_attention` and
            `max_sequence_length` apply to this model alone. Fields that the model decides are refused if they are not
            the default: `dropout`, `gradient_checkpointing` and the projections.
        module_name: their name in the model.

    Returns:
        How many modules were replaced, an int whose `undo()` restores them.

    Raises:
        ImportError: as `register`.
        ValueError, TypeError: there are no such modules, or they do not use transformers' attention interface; the
            model is unchanged.
    """
    return _replace(model, config, "module_name", module_name, exact=True)


def replace_gpt2_attention(model: Any, config: StreamAttentionConfig, module_name: str = "attn") -> Replaced:
    """The same for GPT-2, whose modules are called `attn`."""
    return _replace(model, config, "module_name", module_name, exact=True)


def replace_attention_generic(model: Any, config: StreamAttentionConfig, name_pattern: str = "attn") -> Replaced:
    """The same for any model: every attention module whose path contains `name_pattern`.

    Modules that share a config share their attention, so the pattern must cover all of them.
    """
    return _replace(model, config, "name_pattern", name_pattern, exact=False)


def _replace(model: Any, config: StreamAttentionConfig, argument: str, name: str, exact: bool) -> Replaced:
    if not isinstance(name, str) or not name:
        refuse(argument, "a name", repr(name), error=TypeError)
    register()
    from .replace import replace

    def named(path: str) -> bool:
        return path.rpartition(".")[2] == name if exact else name in path

    return replace(model, config, named, f"{argument} {name!r}")


def _check_version() -> None:
    try:
        from transformers import __version__
    except ImportError:
        raise ImportError("stream_attention.integration.hf needs transformers: pip install transformers") from None
    version = tuple(int(part) for part in __version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(
            f"transformers: expected 4.56 or newer; got {__version__}. Older ones pass caches and masks differently. "
            "Type: pip install --upgrade transformers"
        )
