"""What the check before timing looks at: the heads, rows and gradients of the very problem that is timed."""

from dataclasses import replace

import pytest
import torch

from stream_attention_tools.bench.accuracy import GRADIENT_ROWS, check, check_all
from stream_attention_tools.bench.providers import Ours
from stream_attention_tools.bench.suites import Cell
from stream_attention_tools.testing.inputs import Case, Tensors, draw, packed

MANY = Case(B=2, Tq=40, Tk=40, Hq=12, Hkv=6, D=16, Dv=16)
LONG = Case(B=2, Tq=300, Tk=320, Hq=8, Hkv=4, D=16, Dv=16, causal=True)
PACKED = packed(replace(MANY, causal=True), (7, 40, 300, 1, 90), (7, 64, 300, 33, 91))
assert LONG.Tq > GRADIENT_ROWS


class HeadsLost(Ours):
    """Ours, with the output of some heads zero."""

    def __init__(self, lost: slice) -> None:
        super().__init__("lost", "auto")
        self.lost = lost

    def attend(self, x: Tensors) -> torch.Tensor:
        out = super().attend(x).clone()
        out[:, :, self.lost] = 0
        return out


class LongGradientBent(Ours):
    """Ours, its query gradient a hundredth off in some heads of a problem longer than gradients are compared on."""

    def __init__(self, bent: slice = slice(None)) -> None:
        super().__init__("bent", "auto")
        self.bent = bent

    def attend(self, x: Tensors) -> torch.Tensor:
        query = x.query
        if query.shape[1] > GRADIENT_ROWS:
            weight = torch.zeros_like(query)
            weight[:, :, self.bent] = 0.01
            query = query + weight * (query - query.detach())
        return super().attend(x._replace(query=query))


def cell_of(case: Case, direction: str = "forward") -> Cell:
    return Cell("cell", case, direction, (), ())


@pytest.mark.parametrize("lost", [slice(4, None), slice(11, None), slice(0, 1)], ids=str)
def test_the_first_and_the_last_heads_are_looked_at(lost: slice) -> None:
    assert check(HeadsLost(slice(0, 0)), cell_of(MANY), draw(MANY)).right
    assert not check(HeadsLost(lost), cell_of(MANY), draw(MANY)).right


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": (2, 12, 40, 40), "alibi": "BH"},
        {"bias": (12, 40, 40), "sink": True},
        {"bias": (1, 1, 40, 40), "alibi": "H"},
        {"dropout_p": 0.3, "alibi": "H"},
    ],
    ids=str,
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_some_heads_have_their_own_modifiers(changes: dict[str, object], direction: str) -> None:
    case = replace(MANY, **changes)
    verdict = check(Ours("stream", "auto"), cell_of(case, direction), draw(case))
    assert verdict.right, verdict


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("direction", ["backward", "forward+backward"])
def test_the_gradient_of_the_query_is_compared_at_the_size_that_is_timed(direction: str, dropout_p: float) -> None:
    case = replace(LONG, dropout_p=dropout_p)
    x = draw(case)
    assert check(Ours("stream", "auto"), cell_of(case, direction), x).right
    verdict = check(LongGradientBent(), cell_of(case, direction), x)
    assert not verdict.right and verdict.of == "d_query"
    assert check(LongGradientBent(), cell_of(case), x).right  # forward alone: nobody asked for it


@pytest.mark.parametrize("bent", [slice(0, 1), slice(7, 8)], ids=str)
def test_that_gradient_too_is_compared_in_the_first_and_the_last_heads(bent: slice) -> None:
    assert not check(LongGradientBent(bent), cell_of(LONG, "backward"), draw(LONG)).right


def test_inputs_that_want_gradients_are_left_as_they_were() -> None:
    x = draw(LONG)
    leaves = (x.query, x.key, x.value)
    for leaf in leaves:
        leaf.requires_grad_()
    assert check(Ours("stream", "auto"), cell_of(LONG, "backward"), x).right
    assert all(leaf.grad is None for leaf in leaves)


# Packed sequences


class RowsLost(Ours):
    """Ours, with some rows of the pack zero."""

    def __init__(self, lost: slice) -> None:
        super().__init__("lost", "auto")
        self.lost = lost

    def attend(self, x: Tensors) -> torch.Tensor:
        out = super().attend(x).clone()
        out[self.lost] = 0
        return out


class OneSequence(Ours):
    """Ours, as if all rows were one sequence."""

    def attend(self, x: Tensors) -> torch.Tensor:
        end = {"q": len(x.query), "k": len(x.key)}
        whole = {f"cu_seqlens_{side}": torch.tensor([0, rows]) for side, rows in end.items()}
        longest = {f"max_seqlen_{side}": rows for side, rows in end.items()}
        return super().attend(x._replace(options=x.options | whole | longest))


@pytest.mark.parametrize(
    "changes",
    [{}, {"causal": False, "alibi": "BH", "sink": True}, {"window": (9, -1), "softcap": 5.0}, {"dropout_p": 0.3}],
    ids=str,
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_packed_sequences_are_compared_each_with_itself(changes: dict[str, object], direction: str) -> None:
    case = replace(PACKED, **changes)
    verdict = check(Ours("stream", "auto"), cell_of(case, direction), draw(case))
    assert verdict.right, verdict


def test_a_provider_that_sees_other_sequences_is_found_out() -> None:
    assert not check(OneSequence("one", "auto"), cell_of(PACKED), draw(PACKED)).right


@pytest.mark.parametrize("lost", [slice(0, 7), slice(47, 347), slice(348, None)], ids=["first", "longest", "last"])
def test_the_first_the_longest_and_the_last_sequences_are_looked_at(lost: slice) -> None:
    assert not check(RowsLost(lost), cell_of(PACKED), draw(PACKED)).right


def test_every_row_of_a_pack_is_compared_where_it_is_asked_for() -> None:
    verdicts = check_all(Ours("stream", "auto"), cell_of(PACKED, "backward"), draw(PACKED))
    assert [verdict.of for verdict in verdicts] == ["out", "d_query", "d_key", "d_value"]
    assert all(verdict.right for verdict in verdicts)
    assert not check_all(RowsLost(slice(347, 348)), cell_of(PACKED), draw(PACKED))[0].right
