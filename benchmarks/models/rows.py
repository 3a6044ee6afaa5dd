"""What is measured: prefill, decoding and training, and who computes each."""

from __future__ import annotations

from typing import Literal, NamedTuple

OURS = "stream_attention"
PEERS = ("sdpa", "flash_attention_2", "flash_attention_3")
STATIC = (f"{OURS} static", "sdpa static")
CODES = (f"{OURS} int8", f"{OURS} int4")

BAR = 1 / 0.98
"""What our time may be at most as a multiple of the fastest peer's: as fast, within noise."""


class Row(NamedTuple):
    """One run. Who computes is an `attn_implementation` and, behind a blank, a cache that is not the default one."""

    name: str
    direction: Literal["prefill", "decode", "training"]
    context: int  # tokens of the prompt
    batch: int = 1
    new: int = 0  # tokens decoded after it, a step each
    beside: tuple[str, ...] = ()  # measured and shown too, but held to no bar

    @property
    def providers(self) -> tuple[str, ...]:
        return (OURS, *PEERS, *self.beside)

    @property
    def tokens(self) -> int:
        """What tokens per second count: of a run, for decoding of a step."""
        return self.batch * (1 if self.direction == "decode" else self.context)


def rows(tiny: bool = False) -> list[Row]:
    """All rows, or the same at sizes for a test."""
    short, long, new, few, many = (48, 96, 12, 4, 3) if tiny else (8192, 32768, 256, 64, 16)
    k = {short: "48" if tiny else "8k", long: "96" if tiny else "32k"}
    return [
        Row(f"prefill {k[short]}", "prefill", short),
        Row(f"prefill {k[long]}", "prefill", long),
        Row(f"decode b1 {k[short]}", "decode", short, 1, new, STATIC),
        Row(f"decode b{many} {k[short]}", "decode", short, many, new, STATIC),
        Row(f"decode b1 {k[long]}", "decode", long, 1, new, (*STATIC, *CODES)),
        Row(f"decode b{many} {k[long]}", "decode", long, many, few, (STATIC[0], *CODES)),  # sdpa's repeats its keys
        Row(f"training {k[short]}", "training", short),
    ]
