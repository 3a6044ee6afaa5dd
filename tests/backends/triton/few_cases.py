"""Calls of few queries against many keys, for the interpreter and for a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from stream_attention_tools.testing import Case

BASE = Case(B=2, Tq=1, Tk=5000, Hq=4, Hkv=2, D=64, Dv=64, dtype=torch.bfloat16)
NAMED: dict[str, Case] = {
    "one query": BASE,
    "causal": replace(BASE, Tq=5, causal=True),
    "full": replace(BASE, Tq=5),
    "sixteen": replace(BASE, Tq=16, causal=True),
    "a window": replace(BASE, Tq=3, window=(70, 0)),
    "both sides": replace(BASE, Tq=4, window=(70, 1)),
    "softcap": replace(BASE, softcap=5.0),
    "alibi": replace(BASE, Tq=2, causal=True, alibi="BH"),
    "sink": replace(BASE, Tq=2, causal=True, sink=True),
    "everything": replace(BASE, Tq=3, causal=True, window=(200, 0), softcap=5.0, alibi="H", sink=True, scale=0.3),
    "no groups": replace(BASE, Hq=2),
    "eight heads on one": replace(BASE, B=1, Hq=8, Hkv=1, Tq=2),
    "wide": replace(BASE, D=128, Dv=128),
    "values narrower": replace(BASE, D=80, Dv=40),
    "fp16": replace(BASE, dtype=torch.float16),
    "heads first": replace(BASE, layout="heads_first"),
    "rows that start anywhere": replace(BASE, layout="offset"),
}
OTHERS: dict[str, Case] = {
    "mask": replace(BASE, Tk=300, mask=(1, 1, 1, 300)),
    "bias": replace(BASE, Tk=300, bias=(1, 4, 1, 300)),
    "dropout": replace(BASE, Tk=300, dropout_p=0.1),
    "many queries": replace(BASE, Tk=300, Tq=33),
    "few keys": replace(BASE, Tk=255),
    "fp32": replace(BASE, Tk=300, dtype=torch.float32),
}
