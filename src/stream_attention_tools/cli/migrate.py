"""python -m stream_attention.cli.migrate FILE...: calls of other attention libraries, and what each becomes.

Finds calls of flash_attn, flash_attn_interface, torch's scaled_dot_product_attention and xformers by the imports of a
file, and `attn_implementation="flash_attention_2"`. Nothing is written: each call is printed with its line, with the
call of ours that computes the same, and with what to know about it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from stream_attention.compat import bert_padding, flash_attn, flash_attn_interface, sdpa, xformers

from .command import Refused, command

Given = dict[str, str]
"""The arguments of a call that is found, by the library's names, as they are written."""


class Advice(NamedTuple):
    """What a call becomes: lines of code, and notes."""

    code: list[str]
    notes: list[str]


class Found(NamedTuple):
    line: int
    source: str
    advice: Advice


_KEYWORDS = {
    "cu_seqlens_q": "cu_seqlens_q",
    "cu_seqlens_k": "cu_seqlens_k",
    "max_seqlen_q": "max_seqlen_q",
    "max_seqlen_k": "max_seqlen_k",
    "block_table": "page_table",
    "causal": "causal",
    "window_size": "window",
    "alibi_slopes": "alibi_slopes",
    "softcap": "softcap",
    "softmax_scale": "scale",
    "scale": "scale",
    "dropout_p": "dropout_p",
    "p": "dropout_p",
    "deterministic": "deterministic",
    "return_attn_probs": "return_lse",
    "return_softmax_lse": "return_lse",
}
"""Arguments that are keywords of ours under another name, or the same."""

_TUNING = ("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "op")
_NOT_HERE = ("qv", "q_descale", "k_descale", "v_descale", "attention_chunk", "output_dtype")
_NOTES = {
    "window_size": "-1 alone leaves a side open: another number below 0 is refused",
    "softcap": "0 alone is none: a number below 0 is refused",
    "return_attn_probs": "returns (out, lse), without probabilities",
    "deterministic": "False is also under torch.use_deterministic_algorithms; None follows it",
    "dropout_p": "the same probability, another pattern; `seed=` fixes it",
    "p": "the same probability, another pattern; `seed=` fixes it",
}


def _call(name: str, tensors: str, given: Given, without: tuple[str, ...] = ()) -> str:
    """A call of ours, with the keywords among `given`."""
    shown = [f"{_KEYWORDS[k]}={text}" for k, text in given.items() if k in _KEYWORDS and k not in without]
    return f"{name}({', '.join([tensors, *shown])})"


def _notes(given: Given) -> list[str]:
    found = [f"{name}: {note}" for name, note in _NOTES.items() if given.get(name, "0.0") not in ("0.0", "(-1, -1)")]
    found += [f"{name}: leave it out; it changes no result" for name in _TUNING if name in given]
    return found + [f"{name}: nothing here does it" for name in _NOT_HERE if name in given]


def _dense(given: Given) -> Advice:
    return Advice([_call("attention", _tensors(given), given)], _notes(given))


def _packed(given: Given) -> Advice:
    if "block_table" in given:
        tensors = f"{_tensors(given)}, {given['cu_seqlens_q']}, {_tight(given['cu_seqlens_k'])}.diff()"
        without = "cu_seqlens_q", "cu_seqlens_k", "dropout_p", "deterministic"
        more = {} if "causal" in given else {"causal": "False"}
        return Advice([_call("paged_attention", tensors, given | more, without)], _notes(given))
    if "cu_seqlens" in given:
        given = given | {f"cu_seqlens_{side}": given["cu_seqlens"] for side in "qk"}
        given |= {f"max_seqlen_{side}": given["max_seqlen"] for side in "qk"}
    notes = [f"{name}: nothing here takes it; pass a pack of the rows that are used" for name in _used(given)]
    return Advice([_call("varlen_attention", _tensors(given), given)], [*notes, *_notes(given)])


def _tight(text: str) -> str:
    """An expression to which an attribute may be appended."""
    plain = isinstance(ast.parse(text, mode="eval").body, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return text if plain else f"({text})"


def _used(given: Given) -> list[str]:
    return [name for name in ("seqused_q", "seqused_k") if name in given]


def _tensors(given: Given) -> str:
    if "num_heads_q" in given:
        return f"*{_tight(given['qkv'])}.split([{given['num_heads_q']}, Hkv, Hkv], 2)"
    if "qkv" in given:
        return f"*{_tight(given['qkv'])}.unbind(-3)"
    if "kv" in given:
        return f"{given['q']}, *{_tight(given['kv'])}.unbind(-3)"
    return f"{given['q']}, {given['k']}, {given['v']}"


def _cached(given: Given) -> Advice:
    lengths = given.get("cache_seqlens")
    table = given.get("block_table", given.get("page_table"))
    stores = f"{given['k_cache']}, {given['v_cache']}"
    code, notes = [], []
    if "k" in given:
        lengths = f"{_tight(lengths or 'None')}.clone()"
        notes.append("cache_seqlens: append() advances the lengths of its cache, the library does not")
    made = f"ContiguousKV({stores}, {lengths})" if table is None else f"PagedKV({stores}, {table}, {lengths})"
    code.append(f"cache = {made}")
    if "k" in given:
        code.append(f"cache.append({given['k']}, {given['v']})")
    notes.append("cache_seqlens: an int32 tensor [B]")
    for name in ("rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "cu_seqlens_q", "cu_seqlens_k_new"):
        if name in given:
            notes.append(f"{name}: stream_attention.compat has the whole function; see docs/coming_from.md")
    more = {} if "causal" in given else {"causal": "False"}
    without = "block_table", "cu_seqlens_q", "max_seqlen_q"
    code.append(_call("decode_attention", f"{given['q']}, cache", given | more, without))
    return Advice(code, [*notes, *_notes(given)])


def _sdpa(given: Given) -> Advice:
    query, key, value = (f"{_tight(given[name])}.transpose(1, 2)" for name in ("query", "key", "value"))
    notes = ["the layout here is [B, T, H, D]: without the transposed views, if the model has it"]
    more = {}
    if "attn_mask" in given:
        more["mask"] = given["attn_mask"]
        notes.append("attn_mask: a boolean one is `mask` here, True = attend, as there; a floating one is `bias`")
    if "is_causal" in given:
        more["causal"] = given["is_causal"]
        notes.append("is_causal: top-left there, bottom-right here: the same where there are as many queries as keys")
    if "enable_gqa" in given:
        notes.append("enable_gqa: leave it out; Hq may be any multiple of Hkv")
    called = _call("attention", f"{query}, {key}, {value}", given)
    keywords = "".join(f", {name}={text}" for name, text in more.items())
    return Advice([f"{called[:-1]}{keywords}).transpose(1, 2)"], [*notes, *_notes(given)])


def _xformers(given: Given) -> Advice:
    tensors = ", ".join(given[name] for name in ("query", "key", "value"))
    bias = given.get("attn_bias", "None")
    notes, more = [], ""
    if "LowerTriangularMask(" in bias:
        more = ", causal=True"
        notes.append("attn_bias: top-left there, bottom-right here: the same where there are as many queries as keys")
    elif bias != "None":
        more = f", bias={bias}"
        notes.append("attn_bias: a tensor is `bias`; for the classes see docs/coming_from.md")
    return Advice([f"{_call('attention', tensors, given)[:-1]}{more})"], [*notes, *_notes(given)])


def _combine(given: Given) -> Advice:
    notes = ["returns (out, lse) with lse [B, H, T]; nothing is written into `out`"]
    return Advice([f"merge_states({given['out_partial']}, {_tight(given['lse_partial'])}.transpose(2, 3))"], notes)


def _metadata(given: Given) -> Advice:
    return Advice([], ["leave it out: the work is shared on the device; paged_plan lists it once for all layers"])


def _kept(given: Given) -> Advice:
    return Advice([], ["from stream_attention.compat.bert_padding import it"])


Rule = Callable[[Given], Advice]
_RULES: dict[str, dict[str, Rule]] = {
    "flash_attn": {
        "flash_attn_func": _dense,
        "flash_attn_kvpacked_func": _dense,
        "flash_attn_qkvpacked_func": _dense,
        "flash_attn_varlen_func": _packed,
        "flash_attn_varlen_kvpacked_func": _packed,
        "flash_attn_varlen_qkvpacked_func": _packed,
        "flash_attn_with_kvcache": _cached,
        **dict.fromkeys(bert_padding.__all__, _kept),
    },
    "flash_attn_interface": {
        "flash_attn_combine": _combine,
        "flash_attn_func": _dense,
        "flash_attn_qkvpacked_func": _dense,
        "flash_attn_varlen_func": _packed,
        "flash_attn_with_kvcache": _cached,
        "get_scheduler_metadata": _metadata,
    },
    "torch": {"scaled_dot_product_attention": _sdpa},
    "xformers": {"memory_efficient_attention": _xformers, "memory_efficient_attention_forward": _xformers},
}
_MODULES = {
    "flash_attn": (flash_attn, bert_padding),
    "flash_attn_interface": (flash_attn_interface,),
    "torch": (sdpa,),
    "xformers": (xformers,),
}
"""Library -> our modules whose functions have its signatures."""


def calls(source: str) -> list[Found]:
    """The calls of other libraries in a Python source, in the order of lines.

    >>> [found] = calls("from flash_attn import flash_attn_func as f\\nf(q, k, v, 0.0, None, True)")
    >>> found.line, found.advice.code
    (2, ['attention(q, k, v, dropout_p=0.0, scale=None, causal=True)'])
    """
    tree = ast.parse(source)
    names = dict(_imported(tree))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            advice = _advice(node, names)
            if advice is not None:
                found.append(Found(node.lineno, " ".join(ast.unparse(node).split()), advice))
    return sorted(found, key=lambda one: one.line)


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Name in the file -> what it is, from the root of its library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (root, root)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _advice(node: ast.Call, names: dict[str, str]) -> Advice | None:
    head, dot, rest = ast.unparse(node.func).partition(".")
    path = f"{names.get(head, '')}{dot}{rest}"
    library, name = path.partition(".")[0], path.rpartition(".")[2]
    rule = _RULES.get(library, {}).get(name)
    if rule is None:
        return _of_a_model(node)
    if any(isinstance(one, ast.Starred) for one in node.args) or any(one.arg is None for one in node.keywords):
        return Advice([], ["its arguments are passed by * or **: see docs/coming_from.md"])
    function = next(getattr(module, name) for module in _MODULES[library] if hasattr(module, name))
    texts = {one.arg or "": ast.unparse(one.value) for one in node.keywords}
    try:
        bound = inspect.signature(function).bind(*map(ast.unparse, node.args), **texts)
    except TypeError as error:
        return Advice([], [f"{name}: {error}"])
    return rule(bound.arguments)


def _of_a_model(node: ast.Call) -> Advice | None:
    """A call of transformers that asks for FlashAttention by name."""
    asked = {ast.unparse(one.value).strip("'\"") for one in node.keywords if one.arg == "attn_implementation"}
    if not asked & {"flash_attention_2", "flash_attention_3"}:
        return None
    code = ["from stream_attention.integration.hf import register", "register()"]
    code.append('attn_implementation="stream_attention"')
    return Advice(code, [f"or {asked.pop()}, inside of stream_attention.compat.install"])


def _run(options: argparse.Namespace) -> int:
    count = 0
    for path in options.files:
        try:
            found = calls(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise Refused(f"{path}: expected a Python file; got {error}") from None
        count += len(found)
        for one in found:
            print(f"{path}:{one.line}  {one.source}")
            for line in one.advice.code:
                print(f"    {line}")
            for note in one.advice.notes:
                print(f"    - {note}")
    print(f"calls of other attention libraries: {count}, files: {len(options.files)}")
    return 0


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a Python file")


main = command("python -m stream_attention.cli.migrate", __doc__, _flags, _run)

if __name__ == "__main__":
    sys.exit(main())
