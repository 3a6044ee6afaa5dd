"""StreamAttentionConfig: what the modules of `core` are built from."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any

from ..backends.triton.tuning import FORCEABLE
from ..base.errors import check_int, refuse
from ..dispatch.plan import spell
from ._instruments import instruments

PLANNED = {"tile_size_q": 128, "tile_size_k": 64, "num_warps": 4, "num_stages": 2}
"""The values that mean "planned"."""

MAY_BE_0 = ("star_attention_anchor_size",)
"""The other numbers are at least 1, but for `dropout`."""

RETIRED = {"ring_attention_block_size": 2048, "ring_attention_overlap_size": 256}
"""Removed fields, and their defaults, with which they are still accepted under a DeprecationWarning; other values are
refused."""

_FIELD_OF = {"tile_size_q": "block_m", "tile_size_k": "block_n", "num_warps": "num_warps", "num_stages": "num_stages"}
"""Names in the kernels' configuration."""


def _with_retired(cls: type[Any]) -> type[Any]:
    """A dataclass whose constructor also takes `RETIRED` names."""
    generated = cls.__init__

    @wraps(generated)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        for name in RETIRED:
            if name in values:
                _check_retired(name, values.pop(name))
        generated(self, *args, **values)

    cls.__init__ = __init__
    return cls


@_with_retired
@dataclass
class StreamAttentionConfig:
    """22 fields, each of which has an effect or is refused by the class that reads it.

    Read by `StreamAttention` (and, where noted, by `FlashAttentionV3`). `RingAttention` and `StarAttention` document
    which of these they read too:

    - `num_heads`, `head_dim`: of the queries; hidden states have `num_heads * head_dim` features. `FlashAttentionV3`
      reads them too.
    - `tile_size_q`, `tile_size_k`, `num_warps`, `num_stages`: the defaults (128, 64, 4, 2) mean "planned": the tables
      choose for the problem and the GPU. Any other value forces the Triton kernel with that value, while those left
      at their default stay planned. Forced tiles are those of the forward; the backward is always planned. Tiles are
      16, 32, 64, 128 or 256; a tile too large for a GPU is refused by the compiler when it first runs there.
    - `use_fp16`: fp32 parameters that move to a CUDA device become fp16, unless the move names a dtype. Calls compute
      in the dtype of their input, whatever the parameters are. False where an optimiser wants fp32 parameters.
      `FlashAttentionV3` draws the inputs of its benchmark in that dtype.
    - `gradient_checkpointing`: the forward is recomputed in the backward, while training.
    - `use_qkv_projections`: False leaves `q_proj`, `k_proj`, `v_proj` and `out_proj` out: hidden states are split into
      heads and attend to themselves.
    - `qkv_bias`: the q, k and v projections have a bias. (`out_proj` always has one.)
    - `use_layer_norm`: hidden states are normalised first. Explicit queries, keys and values are not.
    - `dropout`: of the attention weights, while training. `FlashAttentionV3` reads it too.
    - `max_sequence_length`: more keys than this, the cache included, are refused. `FlashAttentionV3` reads it too.
    - `enable_flash_attention`: False computes densely, O(Tq * Tk) memory, in fp64 (backend "reference"), for debugging;
      `FlashAttentionV3` refuses to be built.

    Over several ranks. None of these distributes anything by itself:

    - `enable_distributed`: allows it. False: `RingAttention` computes on its process alone, and `StarAttention` refuses
      more than one host.
    - `enable_ring_attention`, `enable_star_attention`: False: `RingAttention`, `StarAttention` refuse to be built.
    - `star_attention_block_size`, `star_attention_anchor_size`: rows of a block of the context, and how many of the
      first ones every block sees; at most a block.
    - `star_attention_num_hosts`: how many ranks the context is spread over: those of the process group, or 1.

    Caches:

    - `enable_kv_compression`: allows `StarAttention.encode_context(..., compression=...)`, which happens where it is
      asked for and never by itself; `kv_compression_ratio` is its ratio.

    A value that is out of range or of the wrong type raises when it is set, and so does a name that is no field; fields
    that contradict each other raise when a config or a module is made. A module keeps a copy, so changing a field
    afterwards changes modules built after that.

    >>> from stream_attention import StreamAttentionConfig
    >>> StreamAttentionConfig(num_heads=8, head_dim=64).to_dict()["tile_size_q"]
    128
    """

    num_heads: int = 32
    head_dim: int = 128
    tile_size_q: int = 128
    tile_size_k: int = 64
    use_fp16: bool = True
    gradient_checkpointing: bool = False
    use_qkv_projections: bool = True
    qkv_bias: bool = False
    use_layer_norm: bool = False
    dropout: float = 0.0
    enable_distributed: bool = True
    num_warps: int = 4
    num_stages: int = 2
    max_sequence_length: int = 65536
    enable_flash_attention: bool = True
    enable_ring_attention: bool = True
    enable_star_attention: bool = True
    enable_kv_compression: bool = True
    kv_compression_ratio: float = 4.0
    star_attention_block_size: int = 2048
    star_attention_anchor_size: int = 256
    star_attention_num_hosts: int = 1

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RETIRED:
            _check_retired(name, value)
            return
        _refuse_unknown([name], self._fields(), "a field of StreamAttentionConfig", AttributeError)
        kind: type[Any] = type(self._fields()[name])
        _check_type(name, value, kind)
        least = 0 if name in MAY_BE_0 else 1
        if name in PLANNED:
            legal = FORCEABLE[_FIELD_OF[name]]
            if check_int(name, value) not in legal:
                refuse(name, f"one of {', '.join(map(str, legal))}", value)
        elif name == "dropout":
            if not 0 <= value < 1:
                refuse("dropout", "a probability in [0, 1)", value)
        elif kind is not bool and not least <= value < float("inf"):
            refuse(name, f"at least {least}", value)
        super().__setattr__(name, kind(value))

    def __post_init__(self) -> None:
        if self.qkv_bias and not self.use_qkv_projections:
            refuse("qkv_bias", "False without projections", "True with use_qkv_projections=False")
        if not self.enable_flash_attention and self._tiles() != PLANNED:
            found, hint = f"False with {self._tiles()}", "Dense attention has no tiles"
            refuse("enable_flash_attention", "True where tiles are forced", found, hint)

    @property
    def backend(self) -> str:
        """The `backend` of `stream_attention.attention` that these fields ask for."""
        forced = {_FIELD_OF[name]: value for name, value in self._tiles().items() if value != PLANNED[name]}
        tiled = spell("triton", **forced) if forced else "auto"
        return tiled if self.enable_flash_attention else "reference"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StreamAttentionConfig:
        """A config with these fields, the others at their defaults. Names that are no field are refused."""
        if not isinstance(values, Mapping):
            refuse("values", "a mapping of field names to values", type(values).__name__, error=TypeError)
        names = [name for name in values if name not in RETIRED]
        _refuse_unknown(names, cls._fields(), "a field of StreamAttentionConfig")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> StreamAttentionConfig:
        """Read a YAML file that maps field names to values, with the safe loader. An empty file is the defaults.

        Whatever is wrong with it, the message names the file.
        """
        try:
            import yaml
        except ImportError:
            raise ImportError("from_yaml needs PyYAML: pip install pyyaml") from None
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: expected plain YAML; got what its safe loader refuses: {error}") from None
        if values is None:
            return cls()
        if not isinstance(values, dict):
            refuse(str(path), "a mapping of field names to values", f"a {type(values).__name__}", error=TypeError)
        try:
            return cls.from_dict(values)
        except (TypeError, ValueError) as error:
            number = re.search(r"got '([-+]?[\d._]+[eE][-+]?\d+)' \(str\)", str(error))
            raise type(error)(f"{path}: {error}{EXPONENT.format(number[1]) if number else ''}") from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> StreamAttentionConfig:
        """Read the `STREAM_ATTENTION_*` variables of `.env.example`; those that are not set leave the default.

        A value that cannot be parsed raises and names its variable, and so does an unknown variable with this prefix,
        which is most likely misspelt. `environ` replaces `os.environ`.
        """
        environ = os.environ if environ is None else environ
        ours = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
        fields = VARIABLES | RETIRED_VARIABLES
        unknown = [name for name in ours if name not in (*OTHER_VARIABLES, *fields)]
        _refuse_unknown(unknown, VARIABLES, "a variable that is read")
        values = {fields[name]: _parsed(cls, name, ours[name]) for name in fields if name in ours}
        try:
            return cls(**values)
        except ValueError as error:
            named = {field: variable for variable, field in fields.items()}
            field = str(error).partition(":")[0]
            raise ValueError(f"{named[field]} ({error})" if field in named else str(error)) from None

    def to_dict(self) -> dict[str, Any]:
        """Every field and its value; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    def optimal_tile_sizes(self, seq_len: int) -> tuple[int, int]:
        """(tile_size_q, tile_size_k) for causal self-attention over `seq_len` tokens.

        With a CUDA device, the tiles of the Triton kernel's plan for this config (forced ones included), also where
        another kernel is preferred. Without one, or where Triton cannot compute it, a rule of thumb by length alone,
        which nothing else uses.
        """
        tiles: tuple[int, int] = instruments().optimal_tile_sizes(self, seq_len)
        return tiles

    @classmethod
    def _fields(cls) -> dict[str, Any]:
        """Of each field its default."""
        return {field.name: field.default for field in dataclasses.fields(cls)}

    def _tiles(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in PLANNED}


PREFIX = "STREAM_ATTENTION_"
VARIABLES = {
    "STREAM_ATTENTION_NUM_HEADS": "num_heads",
    "STREAM_ATTENTION_HEAD_DIM": "head_dim",
    "STREAM_ATTENTION_TILE_Q": "tile_size_q",
    "STREAM_ATTENTION_TILE_K": "tile_size_k",
    "STREAM_ATTENTION_MAX_SEQ_LEN": "max_sequence_length",
    "STREAM_ATTENTION_ENABLE_KV_COMPRESSION": "enable_kv_compression",
    "STREAM_ATTENTION_KV_COMPRESSION_RATIO": "kv_compression_ratio",
    "STREAM_ATTENTION_STAR_BLOCK_SIZE": "star_attention_block_size",
    "STREAM_ATTENTION_STAR_ANCHOR_SIZE": "star_attention_anchor_size",
    "STREAM_ATTENTION_STAR_NUM_HOSTS": "star_attention_num_hosts",
}
"""What `from_env` reads, and the fields that it sets."""

RETIRED_VARIABLES = {
    "STREAM_ATTENTION_RING_BLOCK_SIZE": "ring_attention_block_size",
    "STREAM_ATTENTION_RING_OVERLAP_SIZE": "ring_attention_overlap_size",
}
"""Those of `RETIRED` fields."""

OTHER_VARIABLES = (
    *("STREAM_ATTENTION_COMMIT", "STREAM_ATTENTION_HOPPER"),
    *("STREAM_ATTENTION_LAUNCH_CACHE", "STREAM_ATTENTION_PREBUILT"),
)
"""With the same prefix, but read elsewhere. docs/environment.md says what they do."""

FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
EXPONENT = (
    ". YAML reads {} as text: a number with an exponent needs a point and a sign there, as in 1.0e-1. Or write 0.1"
)
"""Appended to the error of such a text, which is a number in Python but not in YAML 1.1."""


def _parsed(cls: type[Any], variable: str, text: str) -> Any:
    """The value of an environment variable, in the type of its field's default."""
    kind: type[Any] = type(getattr(cls, (VARIABLES | RETIRED_VARIABLES)[variable], 0))
    expected = {bool: f"one of {', '.join(FLAGS)}", int: "a whole number", float: "a number"}[kind]
    try:
        return FLAGS[text.strip().lower()] if kind is bool else kind(text.strip())
    except (KeyError, ValueError):
        raise ValueError(f"{variable}: expected {expected}; got {text!r}") from None


def _check_retired(name: str, value: Any) -> None:
    """Refuse another value than the default; the warning is of the line that calls this module."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame, depth = frame.f_back, depth + 1
    why = "a ring sends whole shards while it computes with the previous ones"
    if isinstance(value, bool) or value != RETIRED[name]:
        refuse(name, f"none: it is no field any more, as {why}", repr(value), "Leave it out")
    warnings.warn(f"{name} is no field any more, as {why}. Leave it out.", DeprecationWarning, stacklevel=depth + 1)


def _check_type(name: str, value: Any, expected: type) -> None:
    kinds: tuple[type, ...] = (int, float) if expected is float else (expected,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and expected is not bool):
        words = {bool: "a bool", int: "an int", float: "a number"}[expected]
        refuse(name, words, f"{value!r} ({type(value).__name__})", error=TypeError)


def _refuse_unknown(
    names: Iterable[Any], known: Collection[str], what: str, error: type[Exception] = ValueError
) -> None:
    for name in names:
        if name not in known:
            bare = {one.removeprefix(PREFIX): one for one in known}  # the prefix would make all of them similar
            nearest = get_close_matches(str(name).removeprefix(PREFIX), bare, n=1, cutoff=0.6)
            hint = f"Did you mean {bare[nearest[0]]}?" if nearest else f"There are {', '.join(known)}"
            refuse(name, what, "none of that name", hint, error)
