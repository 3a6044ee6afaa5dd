"""Our attention in models of Hugging Face transformers, 4.56 and newer.

    from stream_attention.integration.hf import register
    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="stream_attention")

or, for a model that exists, `replace_llama_attention(model, config)`. No model's code is changed: transformers calls
what stands in its tables of attention functions (`forward`) and mask functions (`masks`) under the name that a model's
config holds. Both are needed: for a name without a mask function it makes no mask at all, padding included.

A cache layer of ours (`caches`) returns keys that say where the keys are, which `placeholder.read` reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.config import StreamAttentionConfig

if TYPE_CHECKING:
    from .replace import Replaced

NAME = "stream_attention"
"""The `attn_implementation`. A name with "flash" in it would make transformers look for flash-attn."""

OLDEST = (4, 56)


def register() -> None:
    """Let `attn_implementation="stream_attention"` mean our attention, in this process; again does nothing.

    Raises:
        ImportError: transformers is not installed, or older than 4.56, where caches and masks reach attention by other
            ways.
    """
    _check_version()
    from transformers import AttentionInterface, AttentionMaskInterface

    from .forward import stream_attention_forward
    from .masks import stream_mask

    AttentionInterface.register(NAME, stream_attention_forward)
    AttentionMaskInterface.register(NAME, stream_mask)


def unregister() -> None:
    """Take the name back; models that use it must choose another attention first. Again does nothing."""
    _check_version()
    from transformers import AttentionInterface, AttentionMaskInterface

    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(NAME, None)


def replace_llama_attention(model: Any, config: StreamAttentionConfig, module_name: str = "self_attn") -> Replaced:
    """Make the attention of a model ours; Llama and all that call it `self_attn` (Mistral, Qwen, Gemma, GPT-OSS, ...).

    Weights, projections and rotary embeddings stay the model's. Registers first. A second call changes the config and
    nothing else.

    Args:
        model: a model of transformers, with or without a head.
        config: `num_heads` and `head_dim` must be the model's; the tiles, `enable_flash_attention` and
            `max_sequence_length` count for this model alone. What the model decides itself is refused if it is not the
            default: `dropout`, `gradient_checkpointing` and the projections.
        module_name: what the model calls them.

    Returns:
        How many modules it were, an int whose `undo()` gives back what was there.

    Raises:
        ImportError: as `register`.
        ValueError, TypeError: there are no such modules, or they do not ask transformers for their attention; the model
            is as it was.
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
        raise TypeError(f"{argument}: expected a name; got {name!r}")
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
            f"transformers: expected 4.56 or newer; got {__version__}. Before, caches and masks reach attention by "
            "other ways, and a mask that is not understood would be lost. Type: pip install --upgrade transformers"
        )
