"""The Triton forward for GPUs that are not here: its plans as data, and what the compiler makes of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from stream_attention.backends import BY_NAME
from stream_attention.kernels.triton.dropout import dropout_words
from stream_attention.kernels.triton.forward import forward
from stream_attention.kernels.triton.merge import launch_merge
from stream_attention.kernels.triton.visibility import keys_seen
from stream_attention.problem import UNBOUNDED, Inputs, Problem, state_problem
from stream_attention.testing.offline import Report, compiling_for, report
from stream_attention.tuning.triton import ANY, COMPUTED, FLOAT32, MASKED, PLAIN, Row, TritonConfig, configure

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


# Plans


def problem(
    B: int = 4, Tq: int = 4096, Tk: int = 4096, Hq: int = 16, Hkv: int = 16, D: int = 128, **facts: Any
) -> Problem:
    """A problem in bf16 on an H200, except for `facts`."""
    h200: dict[str, Any] = {"dtype": BF16, "device": torch.device("cuda"), "arch": 90, "processors": 132}
    shape = {"batch": B, "q_len": Tq, "k_len": Tk, "q_heads": Hq, "kv_heads": Hkv, "head_dim": D, "value_dim": D}
    return Problem(**{**shape, **h200, **facts})


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("right", [UNBOUNDED, 0], ids=["full", "causal"])
def test_long_queries_take_a_row_of_the_table_and_no_splits(dim: int, right: int, length: int) -> None:
    heads = 2048 // dim
    config = configure(problem(B=16384 // length, Tq=length, Tk=length, Hq=heads, Hkv=heads, D=dim, right=right))
    assert config.num_splits == 1 and not config.pack_heads
    assert config in {row.config for row in PLAIN[90] if row.width == dim and row.causal == (right == 0)}


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "dim", "keys", "splits"),
    [
        (1, 32, 8, 128, 8192, 33),  # 264 programs wanted, 8 without splits
        (1, 32, 8, 128, 131072, 33),
        (8, 32, 8, 128, 8192, 4),
        (8, 32, 8, 128, 32768, 4),
        (64, 32, 8, 128, 8192, 1),  # enough programs without
        (64, 32, 8, 128, 1024, 1),
        (1, 32, 32, 128, 16384, 8),
        (16, 64, 8, 128, 16384, 2),
        (8, 16, 2, 64, 32768, 16),
        (16, 8, 1, 256, 16384, 16),
        (1, 8, 8, 128, 256, 2),  # two tiles each, at least
    ],
    ids=str,
)
def test_one_query_splits_the_keys_and_packs_the_heads(
    batch: int, heads: int, kv_heads: int, dim: int, keys: int, splits: int
) -> None:
    config = configure(problem(B=batch, Tq=1, Tk=keys, Hq=heads, Hkv=kv_heads, D=dim))
    assert config.num_splits == splits
    assert config.pack_heads == (heads > kv_heads)
    assert config.block_m == 16
    assert splits * 2 * config.block_n <= keys


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"Tq": 8, "Hq": 8, "Hkv": 1}, (64, True)),
        ({"Tq": 9, "Hq": 8, "Hkv": 1}, None),  # 72 rows
        ({"Tq": 20}, (32, False)),
        ({"Tq": 64}, (64, False)),
        ({"Tq": 65}, None),
        ({"Tq": 1, "Hq": 8, "Hkv": 1, "dropout_p": 0.1}, (16, False)),  # rows of a tile share their column words
        ({"Tq": 1, "Tk": 255}, None),  # too few keys to share
        ({"Tq": 1, "packed": True}, None),
        ({"Tq": 64, "dtype": F32}, (16, False)),
    ],
    ids=str,
)
def test_few_queries(facts: dict[str, Any], expected: tuple[int, bool] | None) -> None:
    config = configure(problem(**{"B": 1, "Tk": 8192, **facts}))
    if expected is None:
        assert config.num_splits == 1 and not config.pack_heads
    else:
        assert (config.block_m, config.pack_heads) == expected
        assert config.num_splits > 1


def test_packed_sequences_are_never_split() -> None:
    for q_len in (1, 16, 4096):
        config = configure(problem(B=1, Tq=q_len, Tk=100_000, Hq=32, Hkv=8, packed=True))
        assert config.num_splits == 1


@pytest.mark.parametrize(
    ("arch", "nearest"),
    [
        (80, 80),
        (82, 80),
        (86, 86),
        (87, 86),
        (89, 89),
        (90, 90),
        (95, 90),
        (100, 100),
        (103, 100),
        (121, 120),
        (200, 120),
    ],
)
def test_an_unknown_architecture_takes_the_nearest_lower_table(arch: int, nearest: int) -> None:
    assert nearest in PLAIN
    for row in PLAIN[nearest]:
        facts = {"arch": arch, "D": row.width, "Tk": min(row.up_to, 8192), "right": 0 if row.causal else UNBOUNDED}
        assert configure(problem(**facts)) == row.config


TABLES = {
    **{f"plain {arch}": table for arch, table in PLAIN.items()},
    **{f"masked {arch}": table for arch, table in MASKED.items()},
    **{f"computed {arch}": table for arch, table in COMPUTED.items()},
    **{f"float32 {arch}": table for arch, table in FLOAT32.items()},
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_a_row_for_every_problem(name: str) -> None:
    for causal in (False, True):
        assert any(row.width == 256 and row.causal == causal and row.up_to == ANY for row in TABLES[name])
    for row in TABLES[name]:
        assert row.config.num_splits == 1 and not row.config.pack_heads


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"mask": True}, "masked 90"),
        ({"bias": BF16}, "masked 90"),
        ({"bias": BF16, "softcap": 20.0}, "masked 80"),
        ({"softcap": 20.0}, "computed 90"),
        ({"dropout_p": 0.1}, "computed 90"),
        ({"alibi": True}, "computed 90"),
        ({"dtype": F32}, "float32 90"),
        ({"dtype": F32, "mask": True}, "float32 90"),
        ({"dtype": F32, "arch": 86}, "float32 80"),
        ({"dtype": F16}, "plain 90"),
        ({"mask": True, "arch": 86}, "masked 80"),
        ({"softcap": 20.0, "arch": 89}, "computed 80"),
    ],
    ids=str,
)
def test_what_needs_registers_has_its_own_table(facts: dict[str, Any], name: str) -> None:
    for dim in (8, 64, 72, 128, 136, 256):
        rows = (row for row in TABLES[name] if dim <= row.width and not row.causal and row.up_to >= 4096)
        assert configure(problem(D=dim, **facts)) == next(rows).config


def test_the_wider_of_the_head_dims_chooses_the_row() -> None:
    assert configure(problem(D=64, value_dim=256)) == configure(problem(D=256))


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"dtype": torch.float64}, "it computes in fp32 and takes no float64"),
        ({"D": 20}, "it takes head dims that are multiples of 8 up to 256, not (20, 20)"),
        ({"value_dim": 264}, "it takes head dims that are multiples of 8 up to 256, not (128, 264)"),
        ({"D": 264}, "it takes head dims that are multiples of 8 up to 256, not (264, 264)"),
        ({"arch": 75}, "it needs compute capability 8.0 or newer, not 7.5"),
        ({"backward": True}, "it has no backward yet"),
        ({"device": torch.device("cpu"), "arch": 0}, "it runs on CUDA devices, not on cpu"),
        ({"device": torch.device("mps"), "arch": 0}, "it runs on CUDA devices, not on mps"),
    ],
    ids=str,
)
def test_why_not(facts: dict[str, Any], sentence: str) -> None:
    assert BY_NAME["triton"].why_not(problem(**facts)) == (sentence,)


@pytest.mark.parametrize("facts", [{}, {"D": 8}, {"D": 256}, {"packed": True}, {"arch": 80}, {"arch": 120}], ids=str)
def test_it_can(facts: dict[str, Any]) -> None:
    assert BY_NAME["triton"].why_not(problem(**facts)) == ()


# What the compiler makes of them

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227}
"""Shared memory a program may use, by architecture."""


@dataclass(frozen=True)
class Compiled:
    """One kernel of the gate: a problem with these modifiers on an architecture, configured as it would be there."""

    arch: int
    D: int
    causal: bool = False
    modifiers: tuple[str, ...] = ()
    Tk: int = 4096
    Tq: int = 128
    Hq: int = 2
    Hkv: int = 2
    Dv: int = 0
    dtype: torch.dtype = BF16

    def inputs(self) -> Inputs:
        shift = 1 if "misaligned" in self.modifiers else 0

        def zeros(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        def rows(length: int, heads: int, dim: int) -> Tensor:
            lead = () if "packed" in self.modifiers else (1,)
            return zeros(length * heads * dim + shift)[shift:].view(*lead, length, heads, dim)

        tile = (1, 1, self.Tq, self.Tk)
        offsets = torch.tensor([0, self.Tq], dtype=torch.int32), torch.tensor([0, self.Tk], dtype=torch.int32)
        extra = {
            "mask": {"mask": zeros(*tile, dtype=torch.bool)},
            "bias": {"bias": zeros(*tile)},
            "alibi": {"alibi_slopes": zeros(1, self.Hq, dtype=F32)},
            "sink": {"sink": zeros(self.Hq, dtype=F32)},
            "dropout": {"seed": zeros(2, dtype=torch.int64)},
            "packed": {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]},
        }
        options = {name: tensor for modifier in self.modifiers for name, tensor in extra.get(modifier, {}).items()}
        return Inputs(
            rows(self.Tq, self.Hq, self.D),
            rows(self.Tk, self.Hkv, self.D),
            rows(self.Tk, self.Hkv, self.Dv or self.D),
            **options,
        )

    def problem(self, inputs: Inputs) -> Problem:
        stated = state_problem(
            inputs,
            q_len=self.Tq,
            k_len=self.Tk,
            causal=self.causal,
            window=(100, -1) if "window" in self.modifiers else (-1, -1),
            softcap=20.0 if "softcap" in self.modifiers else 0.0,
            scale=self.D**-0.5,
            dropout_p=0.1 if "dropout" in self.modifiers else 0.0,
            deterministic=False,
        )
        there: dict[str, Any] = {"device": torch.device("cuda"), "arch": self.arch, "processors": 132}
        return stated._replace(tf32="tf32" in self.modifiers, **there)

    def config(self) -> TritonConfig:
        return configure(self.problem(self.inputs()))

    def compile(self) -> Report:
        """What the compiler reports of the forward kernel itself; helpers launched beside it are tested below."""
        inputs = self.inputs()
        with compiling_for(self.arch) as compiled:
            forward(self.problem(inputs), inputs, self.config())
        (kernel,) = (kernel for kernel in compiled if kernel.metadata.name == "_forward_kernel")
        return report(kernel)

    def __str__(self) -> str:
        dims = f"d{self.D}" + (f"/{self.Dv}" if self.Dv else "")
        heads = f" {self.Hq}/{self.Hkv} heads, {self.Tq} queries" if self.Hq != self.Hkv or self.Tq < 128 else ""
        shape = f"{dims} {'causal' if self.causal else 'full'} {self.Tk}{heads}"
        return " ".join([f"sm_{self.arch}", str(self.dtype)[6:], shape, *self.modifiers])


def rows_of(arch: int, table: tuple[Row, ...], **how: Any) -> list[Compiled]:
    return [Compiled(arch, row.width, row.causal, Tk=min(row.up_to, 4096), **how) for row in table]


ALL = ("window", "mask", "bias", "alibi", "sink", "softcap", "dropout")
PLAIN_ROWS = [
    *rows_of(90, PLAIN[90]),
    *(row for row in rows_of(80, PLAIN[80]) if row.causal),
    *(row for row in rows_of(86, PLAIN[86]) if row.causal and row.D != 128),
    *(row for row in rows_of(89, PLAIN[89]) if row.causal and row.D == 128),
]
MASKED_ROWS = [
    *(replace(row, modifiers=("mask",) if row.causal else ("bias",)) for row in rows_of(90, MASKED[90])),
    *(replace(row, modifiers=("bias",)) for row in rows_of(80, MASKED[80]) if row.causal),
]
COMPUTED_ROWS = [
    *(replace(row, modifiers=("dropout",) if row.causal else ("softcap",)) for row in rows_of(90, COMPUTED[90])),
    *(replace(row, modifiers=("dropout",)) for row in rows_of(80, COMPUTED[80]) if row.causal),
]
FLOAT32_ROWS = [
    *(row for row in rows_of(90, FLOAT32[90], dtype=F32) if row.causal),
    *(row for row in rows_of(80, FLOAT32[80], dtype=F32) if row.causal and row.D != 256),
    *(row for row in rows_of(86, FLOAT32[80], dtype=F32) if row.causal and row.D == 256),
]
REST = [
    *(Compiled(90, dim, True, (modifier,)) for dim in (64, 128, 256) for modifier in ("window", "alibi")),
    Compiled(90, 128, False, ("alibi",)),
    Compiled(80, 128, True, ("alibi", "window")),
    Compiled(90, 128, True, ALL),
    Compiled(80, 64, True, ALL),
    Compiled(90, 128, True, ("tf32",), dtype=F32),
    Compiled(90, 128, True, ("packed", "sink"), dtype=F16),
    Compiled(90, 64, True, ("misaligned",), Tk=1024),
    Compiled(90, 80, True),
    Compiled(90, 128, True, Dv=64),
    Compiled(90, 64, Tq=64),
    Compiled(90, 128, Tq=1, Hq=8, Hkv=1),
    Compiled(90, 256, Tq=8, Hq=8, Hkv=1),
    Compiled(90, 256, Tq=1, dtype=F32),
    Compiled(80, 256, Tq=64),
    Compiled(80, 256, Tq=1, dtype=F32),
    Compiled(86, 128, Tq=8, Hq=8, Hkv=1),
    Compiled(86, 256, Tq=1),
]
KERNELS = {str(kernel): kernel for kernel in (*PLAIN_ROWS, *MASKED_ROWS, *COMPUTED_ROWS, *FLOAT32_ROWS, *REST)}

SPILLS: dict[str, int] = {
    "sm_90 float32 d128 causal 4096": 352,  # measured: the tiles that spill nothing are slower; see the table
    "sm_90 bfloat16 d128 causal 4096 window mask bias alibi sink softcap dropout": 56,
    "sm_90 bfloat16 d256 causal 4096 dropout": 16,
    "sm_80 float32 d256 full 4096 2/2 heads, 1 queries": 16,
}
"""Bytes that a kernel of the gate is known to spill. Strict: a kernel that spills more or less than its line fails."""

SERIALISED = {"sm_90 bfloat16 d64 causal 4096 mask", "sm_90 bfloat16 d64 full 4096 bias"}
"""Kernels whose products wait for each other, and which are faster all the same: 190 against 175 TFLOP/s on the H200
for the best tile without the warning (2026-11-15, causal 2k, mask)."""


def test_every_row_of_every_table_is_compiled() -> None:
    """Of two rows that differ in `causal` alone, one: a right edge only adds to what a kernel holds."""

    def on(kernels: list[Compiled], *archs: int) -> list[Compiled]:
        return [kernel for kernel in kernels if kernel.arch in archs]

    gated = {
        PLAIN[80]: on(PLAIN_ROWS, 80),
        PLAIN[86]: on(PLAIN_ROWS, 86, 89),
        PLAIN[90]: on(PLAIN_ROWS, 90),
        FLOAT32[80]: on(FLOAT32_ROWS, 80, 86),
        FLOAT32[90]: on(FLOAT32_ROWS, 90),
    }
    for tables, kernels in ((MASKED, MASKED_ROWS), (COMPUTED, COMPUTED_ROWS)):
        for arch in (80, 90):  # on 80 one table serves both
            gated[tables[arch]] = gated.get(tables[arch], []) + on(kernels, arch)
    for name, table in TABLES.items():
        compiled = {(kernel.D, kernel.config()) for kernel in gated[table]}
        assert compiled == {(row.width, row.config) for row in table}, name


@pytest.mark.parametrize("name", KERNELS)
def test_the_compiler_keeps_it_in_registers_and_on_the_matrix_units(name: str) -> None:
    kernel = KERNELS[name]
    config, made = kernel.config(), kernel.compile()
    figures = f"{name}: {config}: {made._replace(instructions=None)}"
    products = made.instructions
    assert made.shared_bytes <= SHARED_KIB[kernel.arch] * 1024, f"does not run at all: {figures}"
    assert made.spill_bytes == SPILLS.get(name, 0), figures
    assert made.registers <= 255, figures
    if name not in SERIALISED:
        assert not [warning for warning in made.warnings if "(C75" in warning], figures  # wgmma that waits for itself
    if kernel.dtype is not F32 or "tf32" in kernel.modifiers:
        warpgroup = kernel.arch >= 90 and config.block_m >= 64  # 64 rows is what a warpgroup's instruction takes
        assert products["HGMMA" if warpgroup else "HMMA"] > 0, f"{figures} {products}"
        assert products["HMMA" if warpgroup else "HGMMA"] == 0, f"{figures} {products}"
    if kernel.dtype is not F32:
        assert (products["LDGSTS"] > 0) != ("misaligned" in kernel.modifiers), f"{figures} {products}"


@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernels_beside_it_compile(arch: int) -> None:
    kernel = Compiled(arch, 64, causal=True, modifiers=("dropout", "mask", "bias"), Tq=64, Hq=4)
    inputs = kernel.inputs()
    stated = kernel.problem(inputs)
    outs, lses = torch.zeros(3, 1, 64, 4, 64), torch.zeros(3, 1, 4, 64)
    with compiling_for(arch) as compiled:
        dropout_words(stated, inputs)
        keys_seen(stated, inputs)
        launch_merge(outs, lses, torch.zeros(4), torch.zeros(1, 64, 4, 64, dtype=BF16), lses[0])
    names = [one.metadata.name for one in compiled]
    assert names == ["_words_kernel", "_words_kernel", "_seen_kernel", "_merge_kernel"]
    for one in compiled[1:]:
        made = report(one)
        assert made.spill_bytes == 0 and not made.warnings, f"{one.metadata.name}: {made}"


def test_a_report_sees_what_spills() -> None:
    """The gate itself: tiles far too large for the register file are reported as such."""
    kernel = Compiled(80, 128, True)
    inputs = kernel.inputs()
    with compiling_for(80) as compiled:
        forward(kernel.problem(inputs), inputs, TritonConfig(128, 64, 4, 2))
    assert report(compiled[0]).spill_bytes > 0
