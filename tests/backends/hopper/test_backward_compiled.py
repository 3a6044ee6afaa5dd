"""The Gluon backward for a Hopper that is not here: its plans as data, and what the compiler makes of them."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Gluon has no interpreter; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

import torch
from compile_gate import F16, FULL, RELEASE, Compiled, problem, with_tables
from gates import GATED_TRITON
from sass_gate import NO_SPILLS, SHARED_BYTES, Spills, as_file, faults_of_any, fingerprint, parse, ran, warn_if_not_run

from stream_attention.backends import BY_NAME
from stream_attention.backends.hopper import tuning
from stream_attention.backends.hopper.tuning import GluonBackwardConfig, configure_backward
from stream_attention.base.problem import Inputs, Problem, Wanted
from stream_attention_tools.testing.offline import compiling_for, disassemble, report

backward = BY_NAME["gluon"].backward

TABLE = {name: row for name, row in vars(tuning).items() if isinstance(row, GluonBackwardConfig)}

CONSUMERS = 2
LAUNCH_REGISTERS = 65536 // (128 * (CONSUMERS + 1)) // 8 * 8
"""What every thread starts with: consumers are a warpgroup each, all other roles together one more."""


# Plans


@pytest.mark.parametrize(
    ("dim", "name"),
    [(40, "D64"), (64, "D64"), (72, "D128"), (128, "D128"), (136, "D256"), (192, "D256"), (256, "D256")],
)
def test_the_head_dim_chooses_the_row(dim: int, name: str) -> None:
    assert configure_backward(problem(D=dim, backward=True)) == TABLE[f"BACKWARD_{name}"]


@pytest.mark.parametrize("config", TABLE.values(), ids=TABLE)
def test_the_registers_that_roles_ask_for_are_there(config: GluonBackwardConfig) -> None:
    """A warpgroup waits for registers until others give them back: one that asks for more than there are hangs."""
    for _, _, of_consumers, of_warps in config.parts:
        assert CONSUMERS * of_consumers + of_warps <= (CONSUMERS + 1) * LAUNCH_REGISTERS
        assert all(24 <= registers <= 240 and registers % 8 == 0 for registers in (of_consumers, of_warps))


# What the compiler makes of them

PLAIN = [Compiled(90, dim, causal, backward=True) for dim in (64, 128, 256) for causal in (False, True)]
EVERYTHING = ("packed", "window", "alibi", "sink", "softcap", "dropout")
MODIFIED = [
    Compiled(90, 128, True, ("packed",), backward=True),
    Compiled(90, 64, True, ("window",), Tq=4096, backward=True),  # all keys are seen
    Compiled(90, 64, False, ("softcap",), backward=True),
    Compiled(90, 128, True, ("alibi",), backward=True),
    Compiled(90, 64, True, ("dropout",), backward=True),
    Compiled(90, 128, True, EVERYTHING, dtype=F16, backward=True),
    Compiled(90, 64, True, ("deterministic",), backward=True),
    Compiled(90, 128, False, ("deterministic",), backward=True),
    Compiled(90, 96, True, backward=True),
    Compiled(90, 192, True, backward=True),
    Compiled(90, 128, False, Tk=4000, backward=True),  # the last tile of keys is cut
    Compiled(90, 64, True, Tq=16384, Tk=16384, backward=True),  # blocks without edges have their own loop
]
CALLS = {str(call): call for call in (*PLAIN, *MODIFIED)}

SPILLS = {
    "3.6": {
        "sm_90 bfloat16 d64 full 4096: all": Spills(240, 8),
        "sm_90 bfloat16 d64 causal 4096: all": Spills(200, 9),
        "sm_90 bfloat16 d128 full 4096: all": Spills(96),
        "sm_90 bfloat16 d128 causal 4096: all": Spills(248),
        "sm_90 bfloat16 d256 full 4096: value": Spills(8),
        "sm_90 bfloat16 d256 causal 4096: key": Spills(28),
        "sm_90 bfloat16 d256 causal 4096: value": Spills(24),
        "sm_90 bfloat16 d128 causal 4096 packed: all": Spills(240),
        "sm_90 bfloat16 d64 causal 4096 window: all": Spills(312, 11),
        "sm_90 bfloat16 d64 full 4096 softcap: all": Spills(1316, 125),
        "sm_90 bfloat16 d128 causal 4096 alibi: all": Spills(440, 4),
        "sm_90 bfloat16 d64 causal 4096 dropout: all": Spills(4104, 372),
        "sm_90 float16 d128 causal 4096 packed window alibi sink softcap dropout: all": Spills(2964, 260),
        "sm_90 bfloat16 d64 causal 4096 deterministic: all": Spills(192, 9),
        "sm_90 bfloat16 d128 full 4096 deterministic: all": Spills(104),
        "sm_90 bfloat16 d96 causal 4096: all": Spills(88),
        "sm_90 bfloat16 d192 causal 4096: key": Spills(28),
        "sm_90 bfloat16 d192 causal 4096: value": Spills(24),
        "sm_90 bfloat16 d128 full 4000: all": Spills(104),
        "sm_90 bfloat16 d64 causal 16384: all": Spills(448, 4),
    },
    "3.7": {
        "sm_90 bfloat16 d64 causal 4096: all": Spills(200, 9),
        "sm_90 bfloat16 d128 causal 4096: all": Spills(196),
        "sm_90 bfloat16 d256 causal 4096: key": Spills(28),
        "sm_90 bfloat16 d256 causal 4096: value": Spills(32),
        "sm_90 float16 d128 causal 4096 packed window alibi sink softcap dropout: all": Spills(2900, 267),
        "sm_90 bfloat16 d128 full 4096 deterministic: all": Spills(96),
    },
    "3.8": {
        "sm_90 bfloat16 d64 causal 4096: all": Spills(272, 15),
        "sm_90 bfloat16 d128 causal 4096: all": Spills(128),
        "sm_90 bfloat16 d256 causal 4096: key": Spills(12),
        "sm_90 bfloat16 d256 causal 4096: value": Spills(32),
        "sm_90 float16 d128 causal 4096 packed window alibi sink softcap dropout: all": Spills(3212, 272),
        "sm_90 bfloat16 d128 full 4096 deterministic: all": Spills(80),
    },
    "3.9": {
        "sm_90 bfloat16 d64 causal 4096: all": Spills(192, 7),
        "sm_90 bfloat16 d128 causal 4096: all": Spills(232),
        "sm_90 bfloat16 d256 causal 4096: key": Spills(28),
        "sm_90 bfloat16 d256 causal 4096: value": Spills(32),
        "sm_90 float16 d128 causal 4096 packed window alibi sink softcap dropout: all": Spills(2588, 208),
        "sm_90 bfloat16 d128 full 4096 deterministic: all": Spills(104),
    },
}
"""Spills that are known, by Triton's release: a launch that spills more than its line fails, and one without a line
that spills at all. Without a second number they are outside the loop over queries. Two sums stay in registers, 128 of
them a thread at D 128: what a tile needs at its end lies in memory meanwhile, and at D 64, with blocks of 128 queries,
so does some of what modifies scores."""


def stated(call: Compiled, inputs: Inputs) -> Problem:
    return call.problem(inputs).replace(deterministic="deterministic" in call.modifiers)


def names(name: str) -> list[str]:
    """The launches of a call, in order: what belongs to rows, then what multiplies."""
    call = CALLS[name]
    config = configure_backward(stated(call, call.inputs()))
    return [f"{name}: rows", *(f"{name}: {part}" for part, *_ in config.parts)]


def gated(release: str) -> list[str]:
    """Calls that are compiled with a release of Triton: all, or one of each configuration, everything that modifies
    scores, and one order of additions."""
    if release == FULL:
        return list(CALLS)
    chosen = [call for call in PLAIN if call.causal]
    chosen += [call for call in MODIFIED if call.D == 128 and call.modifiers in (EVERYTHING, ("deterministic",))]
    return list(map(str, chosen))


def compiled(call: Compiled) -> list[Any]:
    """The kernels of the backward, in order; not that of dropout's random words."""
    inputs = call.inputs()
    one = stated(call, inputs)
    out = torch.zeros_like(inputs.query)
    lse = torch.zeros(out[..., 0].mT.shape)
    with compiling_for(90) as launched:
        backward(one, inputs, configure_backward(one), out, lse, out, None, wanted=Wanted())
    return [kernel for kernel in launched if kernel.metadata.name in ("_prepare_kernel", "_backward_kernel")]


@with_tables
@pytest.mark.parametrize("name", gated(RELEASE))
def test_the_machine_code_is_as_it_should_be(name: str) -> None:
    kernels = dict(zip(names(name), compiled(CALLS[name]), strict=True))
    code = {launch: disassemble(kernel) for launch, kernel in kernels.items()}
    for launch in names(name)[1:]:
        made = report(kernels[launch])
        figures = f"{launch}: {made}"
        known = SPILLS[RELEASE].get(launch, NO_SPILLS)
        loops = CONSUMERS * (2 if configure_backward(stated(CALLS[name], CALLS[name].inputs())).peel else 1)
        assert not faults_of_any(made, parse(code[launch]), loops, known), figures
        assert made.shared_bytes <= SHARED_BYTES, figures
        assert made.registers == LAUNCH_REGISTERS, figures
        assert not made.instructions["HMMA"], figures
    its = ran("backward")
    for launch, sass in code.items():
        warn_if_not_run(sass, launch, its)


def test_what_is_known_of_kernels_is_of_kernels_that_there_are() -> None:
    assert SPILLS.keys() == set(GATED_TRITON)
    launches = {release: {launch for name in gated(release) for launch in names(name)} for release in SPILLS}
    assert all(spills.keys() <= launches[release] for release, spills in SPILLS.items())
    assert ran("backward")["kernels"].keys() == launches[FULL]


@pytest.mark.parametrize("release", GATED_TRITON)
def test_plain_loops_of_wide_heads_do_not_spill(release: str) -> None:
    for name in (str(call) for call in PLAIN if call.D > 64):
        assert all(SPILLS[release].get(launch, NO_SPILLS).in_loop == 0 for launch in names(name))


if __name__ == "__main__":
    found = {}
    for name, call in CALLS.items():
        found |= dict(zip(names(name), map(fingerprint, map(disassemble, compiled(call))), strict=True))
    print(as_file(sys.argv[1], found))
