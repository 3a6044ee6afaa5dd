"""The tolerance of attention in FP8, derived from its specification's error: a kernel may be as wrong as that, and as
sums of FP8 products are on matrix units, and no more.

With `exact` what the quantised values mean in fp64 and `spec` the same with weights rounded to e4m3
(backends/reference/fp8.py), a row's specified error, `spec_error`, is spec - exact. Rows are looked at one by one: one
that sees a single key errs a hundred times more than one that averages thousands, and would hide whatever is wrong with
it. Four things are asked:

    row         max |out - exact|  <=  2 max |spec_error| + 2 max tipped + 4 max noise + max cut + rounding, every row
    error       rms(out - exact)   <=  1.25 rms(spec_error, tipped, noise, cut, rounding)                 over all rows
    distance    rms(out - spec)    <=  1.5 rms(tipped, noise, cut, rounding)                              over all rows
    lse         |lse - exact|      <=  sum_j p_j off_j + 6 (sum_j (p_j off_j)^2)^1/2 + 2^-22 (2 + |lse|)

What is taken over all rows is in units of rms(spec_error, tipped, noise, cut, rounding) of its row, so that every row
counts, and may be (1 + 4 rows^-1/2)^1/2 times that: few rows scatter. `rounding` is that of the result to its dtype.
The rest is what no kernel can avoid, computed from the values at hand:

- `off`, the error of a weight by that of its score, relative. Matrix units of Hopper (and of Ada, it is said) keep 13
  fraction bits of a sum of FP8 products, every 32 terms anew; fp32 keeps 23. What that makes of a score is computed
  (`matrix_unit_sums`), as no formula holds: with an outlier in one channel errors are three times those of Gaussian
  rows of the same size. In log2 units, with x the score,

      off = |x of matrix units - x| + 2^-23 (8 + |x|)

  Results on a GPU are allowed that; others, which Triton's interpreter computes, have 23 bits and the second term.
- `tipped`: a weight so near to the middle between two e4m3 values that 2 `off` decide may have either. And one below
  2^-13 of its row's largest is rounded more finely by a kernel that has not met that one yet. The weights are known, so
  it is known which. (A conditional rescale may round rows of many equal weights less finely; that is not allowed for.)
  For Gaussian rows this is 0.3 to 0.5 of the specified error at 13 bits, and next to nothing at 23.
- `noise`: weights that are off move the output by p_j off_j (v_j - out); a value that is rounded anew may be worse by
  p_j off_j, or by a spacing at most; and sums over a block of 128 keys are off as scores are.
- `cut`: terms are cut off towards 0. Where those of a block have one sign that is no noise: each loses half a unit of
  the sum, 2^-bits of it at most, on average

      cut = 2^-bits / 2 sum_blocks |sum_j p_j v_j| |sum_j sign v_j|

The factors were fitted to what correct kernels need: emulated in torch over blocks of 64 and 128 keys, from the left
and from the right, with sums of 13 and of 23 bits, on 2,400 problems of Gaussian, tiny, large, huge and heavy-tailed
inputs, outliers in one channel, and values of one sign, or all the same. The largest shares of what is allowed were 0.6
(row), 0.8 (error), 0.6 (distance), 0.4 (lse), with units by the exponents of products, a bit larger than those of now.
test_fp8_tolerance.py repeats a part of that with these, and has what must be refused.
What 13 bits cannot show: sums over blocks that are kept in bf16 are 0.6 of the distance allowed where scores have unit
size, and more than all of it where they are a tenth of that, so a GPU test wants small scores, and fp16, too.

An H200 adds as `matrix_unit_sums` does: errors of sums of random products are the same to 5 % in their mean and size,
and those of equal ones to the last digit (benchmarks/results/h200/fp8_sums.json). So are the errors of single LSEs:
those that two kernels gave for seven calls, of numbers from CUDA's generator, are computed to 3 to 7 digits.

There is no argument that loosens any of this, and NaN is never within a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from benchmarks.studies.matrix_units import MATRIX_UNIT_BITS, TERMS, matrix_unit_sums
from torch import Tensor

from stream_attention.backends.reference import fp8 as reference_fp8
from stream_attention.base.fp8_layout import BLOCK, SHIFT, KeyCodes, QueryCodes, first_block
from stream_attention.base.problem import UNBOUNDED, Problem

ROW_FACTOR = 2.0
ROW_SIGMAS = 4.0
TIP_SIGMAS = 2.0
ERROR_FACTOR = 1.25
DISTANCE_FACTOR = 1.5
SCATTER = 4.0
LSE_SIGMAS = 6.0

FP32_BITS = 23

LN2 = math.log(2)


class Fp8Report(NamedTuple):
    """Errors as shares of what is allowed: at most 1 where the report passed."""

    row: float
    error: float
    distance: float
    lse: float

    @property
    def worst(self) -> float:
        return max(self)


class Fp8Call(NamedTuple):
    """A problem and its quantised values; of packed sequences their offsets too."""

    problem: Problem
    queries: QueryCodes
    keys: KeyCodes
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


class Noise(NamedTuple):
    """What no kernel can avoid; see the top of this file."""

    out: Tensor  # of the shape of out
    tipped: Tensor
    cut: Tensor
    lse: Tensor  # of the shape of lse: the bound


def check_fp8(out: Tensor, lse: Tensor, *call: Any) -> Fp8Report:
    """Compare what a kernel made of quantised values, the fields of an `Fp8Call`, with what they mean.

    Raises:
        AssertionError: something is wrong by more than it may be.
    """
    bits = MATRIX_UNIT_BITS if out.device.type == "cuda" else FP32_BITS
    return check_with_sums(bits, out, lse, *call)


def check_with_sums(bits: int, out: Tensor, lse: Tensor, *call: Any) -> Fp8Report:
    """`check_fp8` of sums that keep this many fraction bits; to show what it refuses on matrix units without any."""
    arguments = Fp8Call(*call)
    problem = arguments.problem
    exact, exact_lse = reference_fp8.attention(*arguments, rounded=False)
    spec, _ = reference_fp8.attention(*arguments)
    if problem.packed:  # rows behind the last sequence
        rows = exact.shape[0]
        nothing = not out[rows:].any() and bool((lse[:, rows:] == -math.inf).all())
        assert nothing, f"{problem}: rows of no sequence are not 0, or their lse is not -inf"
        out, lse = out[:rows], lse[:, :rows]
    assert out.shape == exact.shape, f"{problem}: out is {list(out.shape)}, not {list(exact.shape)}"
    assert lse.shape == exact_lse.shape, f"{problem}: lse is {list(lse.shape)}, not {list(exact_lse.shape)}"
    assert out.dtype is problem.out_dtype, f"{problem}: out is {out.dtype}, not {problem.out_dtype}"
    assert lse.dtype is torch.float32, f"{problem}: lse is {lse.dtype}, not float32"
    visible = exact_lse != -math.inf
    assert torch.equal(lse != -math.inf, visible), f"{problem}: lse is -inf for other rows than it should be"
    assert not out[~visible.mT].any(), f"{problem}: rows of no key are not 0"
    if not visible.any():
        return Fp8Report(0.0, 0.0, 0.0, 0.0)

    noise = noise_of(bits, arguments, exact)
    result, truth, rounded_weights = (t.double()[visible.mT] for t in (out, exact, spec))  # [rows, D]
    unsure, tipped, cut = noise.out[visible.mT], noise.tipped[visible.mT], noise.cut[visible.mT]
    spec_error, dtype = rounded_weights - truth, torch.finfo(out.dtype)
    rounding = (rounded_weights.to(out.dtype).double() - rounded_weights).abs()
    rounding = torch.maximum(rounding, dtype.eps / 5 * rounded_weights.abs())

    in_row = ROW_FACTOR * (_largest(spec_error) + _largest(tipped)) + ROW_SIGMAS * _largest(unsure) + _largest(cut)
    in_row = in_row + dtype.eps / 2 * (_largest(truth) + in_row + dtype.smallest_normal)
    unit = _rms(spec_error, tipped, unsure, cut, rounding).clamp(min=dtype.eps * dtype.smallest_normal)
    far = _over_rows(_rms(tipped, unsure, cut, rounding) / unit).clamp(min=dtype.eps)
    scatter = math.sqrt(1 + SCATTER / math.sqrt(len(unit)))
    report = Fp8Report(
        row=(_largest(result - truth) / in_row).max().item(),
        error=(_over_rows(_rms(result - truth) / unit) / (ERROR_FACTOR * scatter)).item(),
        distance=(_over_rows(_rms(result - rounded_weights) / unit) / (DISTANCE_FACTOR * scatter * far)).item(),
        lse=((lse.double() - exact_lse)[visible].abs() / noise.lse[visible]).max().item(),
    )
    wrong = [name for name, share in report._asdict().items() if not share <= 1.0]
    assert not wrong, f"{problem}: wrong by more than the tolerance: {', '.join(wrong)}; errors by it: {report}"
    return report


def noise_of(bits: int, call: Fp8Call, exact: Tensor) -> Noise:
    outs, tips, cuts, lses = [], [], [], []
    factor = call.problem.scale / LN2
    unit = 2.0**-bits
    for q, k, v, out, masked in _sequences(call, exact):
        x = q @ k.mT * factor  # [Hq, Tq, Tk], as all of them
        off = 2.0**-FP32_BITS * (SHIFT + x.abs())
        if bits < FP32_BITS:
            off = off + (matrix_unit_sums(q, k, bits) * factor - x).abs()
        off = off.masked_fill(masked, 0.0)
        x = x.masked_fill(masked, -math.inf)
        top = x.amax(-1, keepdim=True).ceil() if k.shape[1] else x.new_full((*x.shape[:2], 1), -math.inf)
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = torch.exp2(x - top)
        total = weights.sum(-1, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
        # Relative errors of weights, such that 4 of them are what 4 of `off` do, also where that is much.
        off = torch.expm1((ROW_SIGMAS * LN2 * off).clamp(max=50.0)) / ROW_SIGMAS

        scaled = weights * 2.0**SHIFT
        spacing = torch.ldexp(torch.ones_like(scaled), (torch.frexp(scaled)[1] - 1).clamp(min=-6) - 3)
        from_middle = ((scaled / spacing) % 1 - 0.5).abs() * spacing
        tipped = torch.where(from_middle <= TIP_SIGMAS * off * scaled, spacing, 0.0)
        finer = (reference_fp8.to_e4m3(scaled).double() - scaled).abs() + scaled / 16
        tipped = torch.where(scaled < 2.0**-5, finer, tipped) * (2.0**-SHIFT / total)
        rounded_anew = torch.minimum(off * scaled, spacing) * (2.0**-SHIFT / total)
        p = weights / total
        moved, squares = (p * off).square(), v.square()
        by_scores = moved @ squares - 2 * out * (moved @ v) + moved.sum(-1, keepdim=True) * out.square()
        by_sums = (unit**2 * BLOCK / TERMS) * (out.square() + p.square() @ squares)
        outs.append((by_scores.clamp(min=0.0) + by_sums + rounded_anew.square() @ squares).sqrt())
        tips.append((tipped.square() @ squares).sqrt())
        signs, visible = v.sign(), (p > 0).double()
        blocks = [slice(first, first + BLOCK) for first in range(0, k.shape[1], BLOCK)]
        of_blocks = ((p[..., one] @ v[:, one]) * (visible[..., one] @ signs[:, one]) for one in blocks)
        cuts.append(unit / 2 * sum((part.abs() for part in of_blocks), torch.zeros_like(out)))
        of_lse = (p * off).sum(-1) + LSE_SIGMAS * moved.sum(-1).sqrt()
        lses.append(of_lse + 2.0 ** (1 - FP32_BITS) * (2 + (LN2 * top + total.log())[..., 0].abs()))
    if call.problem.packed:
        of_out, tipped, cut = (torch.cat(x, 1).transpose(0, 1) for x in (outs, tips, cuts))
        return Noise(of_out, tipped, cut, torch.cat(lses, 1))
    of_out, tipped, cut = (torch.stack(x).transpose(1, 2) for x in (outs, tips, cuts))
    return Noise(of_out, tipped, cut, torch.stack(lses))


def _sequences(call: Fp8Call, exact: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Of every sequence its q, k, v and exact output in fp64, `[Hq, T, D]` each, and what is masked, `[Tq, Tk]`."""
    problem, queries, keys, cu_seqlens_q, cu_seqlens_k = call
    query, (key, value) = reference_fp8.dequantized_queries(queries), reference_fp8.dequantized_keys(keys)
    row = 0
    for sequence in range(problem.batch):
        q_len, k_len, offset = problem.q_len, problem.k_len, problem.q_start - problem.k_start
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            q_len, k_len = (int(cu[sequence + 1] - cu[sequence]) for cu in (cu_seqlens_q, cu_seqlens_k))
            offset = k_len - q_len
        q_first = first_block(sequence, problem.q_len, cu_seqlens_q) * BLOCK
        k_first = first_block(sequence, problem.k_len, cu_seqlens_k) * BLOCK
        k, v = (x[:, k_first : k_first + k_len].repeat_interleave(problem.group, 0) for x in (key, value))
        out = exact[row : row + q_len] if problem.packed else exact[sequence]
        row += q_len
        i, j = torch.arange(q_len, device=k.device)[:, None], torch.arange(k_len, device=k.device)[None, :]
        left = problem.left if problem.left != UNBOUNDED else q_len + k_len + abs(offset)
        right = problem.right if problem.right != UNBOUNDED else q_len + k_len + abs(offset)
        masked = (j - i - offset < -left) | (j - i - offset > right)
        yield query[:, q_first : q_first + q_len], k, v, out.transpose(0, 1), masked


def _largest(x: Tensor) -> Tensor:
    """By row; NaN if any is."""
    return x.abs().amax(-1)


def _rms(*parts: Tensor) -> Tensor:
    """Of independent errors together, by row."""
    return torch.stack([x.square().mean(-1) for x in parts]).sum(0).sqrt()


def _over_rows(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
