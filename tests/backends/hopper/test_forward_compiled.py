"""The Gluon forward for a Hopper that is not here: its plans as data, and what the compiler makes of them."""

from __future__ import annotations

import os
import sys
from itertools import product
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Gluon has no interpreter; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from compile_gate import F16, FULL, RELEASE, Compiled, problem, with_tables
from gates import GATED_TRITON
from sass_gate import (
    NO_SPILLS,
    SHARED_BYTES,
    TAIL,
    Iteration,
    Spills,
    as_file,
    faults,
    fingerprint,
    measure,
    parse,
    product_loops,
    ran,
    shortest,
    warn_if_not_run,
)

from stream_attention.backends import BY_NAME
from stream_attention.backends.hopper import tuning
from stream_attention.backends.hopper.fp8_tuning import GLUON
from stream_attention.backends.hopper.kernels import prepare_into
from stream_attention.backends.hopper.tuning import ROWS, WIDTHS, GluonConfig, configure, joining, tile_widths
from stream_attention.base.problem import Inputs, Problem
from stream_attention_tools.testing.offline import Report, compiling_for, disassemble, report

forward = BY_NAME["gluon"].forward

BARRIER_BYTES = 1024
"""Room beside the rings: barriers, the numbers of tiles, and what a reduction passes between warps."""


TABLE: dict[str, GluonConfig] = {name: row for name, row in vars(tuning).items() if isinstance(row, GluonConfig)}


# Plans

FEATURES: list[dict[str, Any]] = [
    {},
    {"right": 0},
    {"left": 100, "right": 0},
    {"softcap": 20.0},
    {"alibi": True},
    {"sink": True},
    {"dropout_p": 0.1},
    {"layout": "packed"},
    {"partial": True},
    {"dtype": F16},
    {"right": 0, "k_len": 1024},
    {"right": 0, "k_len": 1024, "partial": True},
    {"layout": "packed", "dropout_p": 0.1},
]
DIMS = [(40, 40), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (256, 72)]
PROBLEMS = [problem(D=dim, value_dim=value_dim, **facts) for (dim, value_dim), facts in product(DIMS, FEATURES)]


def launch_registers(config: GluonConfig) -> int:
    """What every thread starts with: an equal share, in eights; the producer's warp has three idle ones beside it."""
    return 65536 // (128 * (config.warpgroups + 1)) // 8 * 8


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"D": 40}, "D64"),
        ({"D": 64}, "D64"),
        ({"D": 64, "right": 0, "k_len": 1025}, "D64"),
        ({"D": 64, "right": 0, "k_len": 1024}, "D64_SHORT_CAUSAL"),
        ({"D": 64, "k_len": 1024}, "D64"),
        ({"D": 64, "dropout_p": 0.1}, "D64_DROPOUT"),
        ({"D": 72}, "D128"),
        ({"D": 128, "right": 0}, "D128"),
        ({"D": 128, "softcap": 20.0}, "D128"),
        ({"D": 128, "dropout_p": 0.1}, "D128_DROPOUT"),
        ({"D": 136, "right": 0}, "D256"),
        ({"D": 256, "right": 0}, "D256"),
        ({"D": 256, "right": 3}, "D256_MODIFIED"),  # its edge cuts two blocks
        ({"D": 256, "left": 100, "right": 100}, "D256_MODIFIED"),
        ({"D": 256, "softcap": 20.0}, "D256_MODIFIED"),
        ({"D": 256}, "D256"),
        ({"D": 256, "dropout_p": 0.1}, "D256_DROPOUT"),
    ],
    ids=str,
)
def test_the_head_dim_and_what_is_computed_choose_the_row(facts: dict[str, Any], name: str) -> None:
    assert configure(problem(value_dim=facts["D"], **facts)) == TABLE[name]


@pytest.mark.parametrize(
    "config", [*TABLE.values(), tuning.BACKWARD_D64, *GLUON.values()], ids=lambda config: type(config).__name__
)
def test_triton_tells_all_fields_of_a_configuration_apart(config: Any) -> None:
    """A kernel takes a configuration as one constant. What is printed of it is not all of it."""
    others = {config._replace(**{name: None}).cache_key for name in config._fields}
    assert len(others) == len(config._fields) and config.cache_key not in others


@pytest.mark.parametrize("facts", [{}, {"layout": "packed"}, {"D": 192}, {"D": 192, "value_dim": 192}], ids=str)
def test_all_but_fp32_states_leave_by_tma(facts: dict[str, Any]) -> None:
    stated = problem(**{"value_dim": 128, **facts})
    assert configure(stated).by_tma
    assert not configure(stated.replace(partial=True)).by_tma  # fp32 is twice as wide as the queries


def test_no_row_of_the_table_is_out_of_reach() -> None:
    assert set(TABLE.values()) == {config for config in map(configure, PROBLEMS) if config.by_tma}


def test_there_is_a_configuration_for_every_pair_of_widths() -> None:
    assert {tile_widths(stated) for stated in PROBLEMS} == WIDTHS


def ring_bytes(config: GluonConfig, dim: int, value_dim: int) -> int:
    queries = config.q_slots * config.warpgroups * ROWS * dim
    keys, values = config.k_slots * config.block_n * dim, config.v_slots * config.block_n * value_dim
    return 2 * (queries + keys + values)


@pytest.mark.parametrize("stated", PROBLEMS, ids=str)
def test_the_rings_fit_into_shared_memory(stated: Problem) -> None:
    assert ring_bytes(configure(stated), *tile_widths(stated)) <= SHARED_BYTES - BARRIER_BYTES


@pytest.mark.parametrize("stated", [one for one in PROBLEMS if tile_widths(one)[1] <= 128], ids=str)
def test_a_state_that_is_joined_fits_beside_them_or_into_a_slot_of_keys(stated: Problem) -> None:
    config, states = joining(stated, configure(stated))
    dim, value_dim = tile_widths(stated)
    tile = 4 * ROWS * value_dim
    assert ring_bytes(config, dim, value_dim) + states * tile <= SHARED_BYTES - BARRIER_BYTES
    assert config._replace(q_slots=0) == configure(stated)._replace(q_slots=0)
    if states < config.warpgroups:
        assert states == config.warpgroups - 1 and tile == 2 * config.block_n * dim
        # A consumer that skips a block holds on to that slot until it has the keys behind it.
        assert -(-(config.warpgroups - 1) * ROWS // config.block_n) + 1 < config.k_slots


@pytest.mark.parametrize("config", TABLE.values(), ids=str)
def test_a_warpgroup_that_skips_blocks_does_not_wait_for_slots_that_it_holds(config: GluonConfig) -> None:
    """In a causal tile the first warpgroup sees fewer blocks than the last. It waits for the keys behind those it skips
    before it lets go of their values: with fewer slots of K than that the producer could not load them."""
    assert -(-(config.warpgroups - 1) * ROWS // config.block_n) < config.k_slots


@pytest.mark.parametrize("stated", PROBLEMS, ids=str)
def test_the_registers_that_roles_ask_for_are_there(stated: Problem) -> None:
    """A warpgroup waits for registers until others give them back: one that asks for more than there are hangs."""
    config = configure(stated)
    asked = config.warpgroups * config.consumer_registers + config.producer_registers
    assert asked <= (config.warpgroups + 1) * launch_registers(config) <= 65536 // 128
    for registers in (config.consumer_registers, config.producer_registers):
        assert 24 <= registers <= 240 and registers % 8 == 0


# What the compiler makes of them

PLAIN = [
    *(Compiled(90, dim, causal) for dim in (64, 128, 256) for causal in (False, True)),
    Compiled(90, 64, True, Tk=1024),
]
MODIFIED = [
    *(Compiled(90, dim, True, (modifier,)) for dim in (64, 128, 256) for modifier in ("window", "alibi", "dropout")),
    *(Compiled(90, dim, False, ("softcap",)) for dim in (64, 128, 256)),
    Compiled(90, 128, False, ("sink",), dtype=F16),
]
FROM_REGISTERS = [
    *(Compiled(90, dim, True, ("packed",)) for dim in (64, 128, 256)),
    *(
        Compiled(90, dim, True, ("packed", "window", "alibi", "sink", "softcap", "dropout"), dtype=F16)
        for dim in (64, 128, 256)
    ),
    Compiled(90, 64, False, ("partial",)),
    Compiled(90, 64, True, ("partial",), Tk=1024),
    Compiled(90, 128, True, ("partial",)),
    Compiled(90, 256, False, ("partial",)),
    Compiled(90, 192, True, Dv=128),
]
JOINING = [
    Compiled(90, 64, False, ("partial", "joining")),
    Compiled(90, 128, False, ("partial", "joining")),
    Compiled(90, 128, True, ("partial", "joining")),
    Compiled(90, 192, True, ("partial", "joining"), Dv=128),
]
KERNELS = {str(kernel): kernel for kernel in (*PLAIN, *MODIFIED, *FROM_REGISTERS, *JOINING)}

SPILLS = {
    "3.6": {
        "sm_90 bfloat16 d256 causal 4096 window": Spills(136),
        "sm_90 bfloat16 d256 causal 4096 packed": Spills(8),
        "sm_90 float16 d256 causal 4096 packed window alibi sink softcap dropout": Spills(140, 3),
    },
    "3.7": {
        "sm_90 bfloat16 d256 causal 4096 window": Spills(108, 2),
        "sm_90 bfloat16 d256 causal 4096 dropout": Spills(48),
    },
    "3.8": {
        "sm_90 bfloat16 d256 causal 4096 window": Spills(136),
    },
    "3.9": {
        "sm_90 bfloat16 d256 causal 4096 dropout": Spills(76, 4),
    },
}
"""Spills that are known, by Triton's release: a kernel that spills more than its line fails, and one without a line
that spills at all. Without a second number they are once per tile, outside the loop over keys. Triton 3.8 and 3.9 copy
the weights before a product, which the 160 registers of three warpgroups have no room for."""

ITERATIONS = {
    "sm_90 bfloat16 d64 full 4096": Iteration(414, 12, 66),
    "sm_90 bfloat16 d64 causal 4096": Iteration(414, 12, 66),
    "sm_90 bfloat16 d64 causal 1024": Iteration(415, 12, 66),
    "sm_90 bfloat16 d128 full 4096": Iteration(454, 16, 66),
    "sm_90 bfloat16 d128 causal 4096": Iteration(454, 16, 66),
    "sm_90 bfloat16 d256 full 4096": Iteration(419, 20, 34),
    "sm_90 bfloat16 d256 causal 4096": Iteration(416, 20, 34),
}
"""The longest of the consumers' loops over keys, once round where nothing is masked."""

MARGIN = {"3.6": 8, "3.7": 8, "3.8": 32, "3.9": 32}
"""Instructions by which an iteration may differ from its line, by Triton's release: slots and barriers elsewhere shift
it by a few, the copies of 3.8 and 3.9 by a few more."""


TAILS = {"3.6": TAIL, "3.7": TAIL, "3.8": TAIL, "3.9": TAIL + 4}
"""Multiplications and conversions behind the last exponential, at most, by Triton's release: 3.9 has 43 at D 128 with
dropout."""

RAN = ran("forward")
RAN_JOINING = ran("shards")


def stated(kernel: Compiled, inputs: Inputs) -> Problem:
    return kernel.problem(inputs).replace(partial="partial" in kernel.modifiers)


def config_of(kernel: Compiled) -> tuple[GluonConfig, tuple[int, int]]:
    """How a kernel is configured, and the widths of its tiles."""
    one = stated(kernel, kernel.inputs())
    return configure(one), tile_widths(one)


def gated(release: str) -> dict[str, Compiled]:
    """What is compiled with a release of Triton: everything, or what is plain, and of the rest what brings a
    configuration that is not there yet."""
    if release == FULL:
        return KERNELS
    chosen: dict[str, Compiled] = {}
    there: set[Any] = set()
    for name, kernel in KERNELS.items():
        if kernel in PLAIN or config_of(kernel) not in there:
            chosen[name] = kernel
            there.add(config_of(kernel))
    return chosen


def compiled(kernel: Compiled) -> tuple[GluonConfig, Report, str]:
    """The configuration of the forward, what the compiler reports of it, and its machine code."""
    inputs = kernel.inputs()
    config = configure(stated(kernel, inputs))
    with compiling_for(90) as launched:
        if "joining" in kernel.modifiers:
            out = torch.zeros(1, kernel.Tq, kernel.Hq, kernel.Dv or kernel.D)
            states = out, out[..., 0].mT
            joined = prepare_into(stated(kernel, inputs), inputs, config, *states, resumes=True)
            assert joined is not None
            joined(inputs, *states)
        else:
            forward(stated(kernel, inputs), inputs, config)
    (itself,) = (one for one in launched if one.metadata.name == "_forward_kernel")
    return config, report(itself), disassemble(itself)


@pytest.mark.parametrize("release", GATED_TRITON)
def test_every_configuration_is_compiled(release: str) -> None:
    configs = {config_of(kernel)[0] for kernel in gated(release).values()}
    assert {configure(one) for one in PROBLEMS} <= configs


@with_tables
@pytest.mark.parametrize("name", gated(RELEASE))
def test_the_machine_code_is_as_it_should_be(name: str) -> None:
    config, made, sass = compiled(KERNELS[name])
    figures = f"{name}: {config}: {made}"
    assert not faults(made, sass, config.warpgroups, SPILLS[RELEASE].get(name, NO_SPILLS), TAILS[RELEASE]), figures
    assert made.shared_bytes <= SHARED_BYTES, figures
    assert made.registers == launch_registers(config), figures
    assert not made.instructions["HMMA"], figures
    warn_if_not_run(sass, name, RAN_JOINING if KERNELS[name] in JOINING else RAN)
    if KERNELS[name] in PLAIN:
        blocks = parse(sass)
        longest = max(measure(shortest(blocks, loop)) for loop in product_loops(blocks))
        known = ITERATIONS[name]
        assert longest[1:] == known[1:], longest
        assert abs(longest.instructions - known.instructions) <= MARGIN[RELEASE], longest


def test_what_is_known_of_kernels_is_of_kernels_that_there_are() -> None:
    assert KERNELS.keys() == RAN["kernels"].keys() | RAN_JOINING["kernels"].keys()
    assert SPILLS.keys() == MARGIN.keys() == TAILS.keys() == set(GATED_TRITON)
    assert all(spills.keys() <= gated(release).keys() for release, spills in SPILLS.items())
    assert ITERATIONS.keys() == {str(kernel) for kernel in PLAIN}


if __name__ == "__main__":  # COMMIT, and shards or nothing
    its = {name: kernel for name, kernel in KERNELS.items() if (kernel in JOINING) == (sys.argv[2:] == ["shards"])}
    print(as_file(sys.argv[1], {name: fingerprint(compiled(kernel)[2]) for name, kernel in its.items()}))
