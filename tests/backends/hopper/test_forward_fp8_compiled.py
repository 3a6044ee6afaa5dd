"""The Hopper kernel in FP8 for a GPU that is not here: what is planned, and what the compiler makes of it."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from compile_gate import FULL, RELEASE, with_tables
from fp8_cases import CAUSAL, Fp8Call, launch_offline
from gates import GATED_TRITON
from sass_gate import (
    SHARED_BYTES,
    Spills,
    as_file,
    faults_of_any,
    fingerprint,
    parse,
    product_loops,
    ran,
    shortest,
    warn_if_not_run,
)

from stream_attention.backends.hopper.fp8_tuning import configure
from stream_attention_tools.testing.offline import compiling_for, disassemble, report

FORMS = {
    "d64 full": Fp8Call(D=64, Tq=1024, Tk=1024),
    "d64 causal": Fp8Call(D=64, Tq=1024, Tk=1024, window=CAUSAL),
    "d64 packed": Fp8Call(D=64, window=CAUSAL, lengths=((300, 300), (7, 400))),
    "d128 full": Fp8Call(Tq=1024, Tk=1024),
    "d128 causal": Fp8Call(Tq=1024, Tk=1024, window=CAUSAL),
    "d128 packed": Fp8Call(window=CAUSAL, lengths=((300, 300), (7, 400))),
    "d256 full": Fp8Call(D=256, Tq=1024, Tk=1024),
    "d256 packed": Fp8Call(D=256, window=CAUSAL, lengths=((300, 300), (7, 400))),
}

INSTRUCTIONS = {64: 365, 128: 400, 256: 575}
"""An iteration may have, by head dim, where no edge is looked for."""

MARGIN = {"3.6": 0, "3.7": 0, "3.8": 0, "3.9": 8}
"""And so many more, by Triton's release."""

SPILLS = {
    "3.6": {
        "d64 full": Spills(180, 0),
        "d64 causal": Spills(196, 3),
        "d128 packed": Spills(64, 0),
        "d256 full": Spills(16, 0),
        "d256 packed": Spills(12, 0),
    },
    "3.7": {"d64 causal": Spills(300), "d128 packed": Spills(64), "d256 full": Spills(404)},
    "3.8": {"d64 causal": Spills(240, 1)},
    "3.9": {"d64 causal": Spills(240, 1), "d128 packed": Spills(32), "d256 full": Spills(480)},
}
"""Spills that are known, by Triton's release. Without a second number they are outside the loop over keys."""


def gated(release: str) -> list[str]:
    """Forms that are compiled with a release of Triton: all, or one of each head dim, and all that is plain at 128."""
    return list(FORMS) if release == FULL else ["d64 causal", "d128 full", "d128 causal", "d128 packed", "d256 full"]


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    return {}


def compiled(name: str, kept: dict[str, Any]) -> tuple[Any, str]:
    if name not in kept:
        with compiling_for(90) as made:
            launch_offline(FORMS[name], "gluon")
        kept[name] = report(made[0]), disassemble(made[0])
    return kept[name]


@with_tables
@pytest.mark.xdist_group("fp8 on Hopper")
@pytest.mark.parametrize("name", gated(RELEASE))
def test_the_machine_code(name: str, kernels: dict[str, Any]) -> None:
    made, sass = compiled(name, kernels)
    warn_if_not_run(sass, name, ran("forward_fp8"))
    dim = FORMS[name].D
    blocks = parse(sass)
    warpgroups = configure(FORMS[name].stated(*FORMS[name].tensors("cpu"))).warpgroups
    assert not faults_of_any(made, blocks, warpgroups, SPILLS[RELEASE].get(name, Spills()))
    assert made.shared_bytes <= SHARED_BYTES and not made.instructions["HGMMA"] and made.instructions["QGMMA"]
    if name.endswith(("full", "causal")):
        loops = [shortest(blocks, loop) for loop in product_loops(blocks)]
        assert all(len(code) <= INSTRUCTIONS[dim] + MARGIN[RELEASE] for code in loops)
        names = [one.name for one in loops[0]]
        assert not {"PRMT", "LDS", "STS"} & set(names), "weights change lanes, or are taken apart"
        assert names.count("SHFL") == (4 if dim == 256 else 0), "of the maxima of two rows, where they are taken"
        assert names.count("VOTE") == (0 if dim == 256 else 1), "on sums that are too large"
        if dim == 128:  # before the exponentials they cost 11 % of the speed (sweep 17)
            assert names[names.index("VOTE") :].count("FFMA") == 64, "products are not added last"
        assert names.count("MUFU") == 64 and "FRND" not in names, "tops are left to the unit of exponentials"


@pytest.mark.xdist_group("fp8 on Hopper")
@pytest.mark.parametrize("name", [name for name in gated(RELEASE) if FORMS[name].D < 256])
def test_a_warp_raises_its_tops_for_itself(name: str, kernels: dict[str, Any]) -> None:
    """Others do not come there: it would wait for them at a barrier for ever."""
    blocks = parse(compiled(name, kernels)[1])
    votes = [block for block in blocks if any(one.name == "VOTE" for one in block.code)]
    assert len(votes) >= 2, "one for each warpgroup"
    for vote in votes:
        raising = [blocks[to] for to in vote.after if blocks[to].after < vote.after]
        assert len(raising) == 1
        assert not {"BAR", "LDS", "STS", "SYNCS"} & {one.name for one in raising[0].code}


def test_what_is_known_of_kernels_is_of_kernels_that_there_are() -> None:
    assert SPILLS.keys() == MARGIN.keys() == set(GATED_TRITON)
    assert all(spills.keys() <= set(gated(release)) for release, spills in SPILLS.items())
    assert ran("forward_fp8")["kernels"].keys() == set(gated(FULL))


if __name__ == "__main__":
    print(as_file(sys.argv[1], {name: fingerprint(compiled(name, {})[1]) for name in FORMS}))
