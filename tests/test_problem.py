"""The composed problem: one value, whose facts are read and changed by name."""

from __future__ import annotations

import pytest
import torch

from stream_attention.base.problem import KV, Hardware, Operands, Problem, Scores, Shape, Window

PLAIN = Problem(
    Shape(2, 64, 8, 4, 32, 16), KV("dense", 96), Operands(torch.float16), Hardware(torch.device("cuda"), 90, 132)
)


def test_facts_are_read_by_name_whatever_part_they_are_in() -> None:
    assert (PLAIN.batch, PLAIN.q_len, PLAIN.k_len, PLAIN.value_dim, PLAIN.arch) == (2, 64, 96, 16, 90)
    assert (PLAIN.group, PLAIN.kind, PLAIN.packed, PLAIN.cached, PLAIN.right) == (2, "forward", False, False, -1)


def test_every_fact_of_every_part_can_be_read_and_replaced() -> None:
    for part, its in zip(PLAIN._fields, PLAIN, strict=True):
        for name in its._fields:
            changed = PLAIN.replace(**{name: "other"})
            assert changed != PLAIN and "other" in getattr(changed, part)
            assert name == "layout" or getattr(changed, name) == "other"


def test_replace_changes_several_parts_and_shares_the_others() -> None:
    changed = PLAIN.replace(q_len=1, head_dim=64, softcap=2.0, left=7)
    assert changed.shape == Shape(2, 1, 8, 4, 64, 16)
    assert changed.scores == Scores(softcap=2.0) and changed.window == Window(7)
    assert changed.kv is PLAIN.kv and changed.hardware is PLAIN.hardware
    assert PLAIN.replace() == PLAIN and hash(PLAIN.replace(q_len=64)) == hash(PLAIN)
    with pytest.raises(KeyError, match="length"):
        PLAIN.replace(length=1)


def test_layouts_of_the_same_keys_are_different_problems() -> None:
    layouts = [PLAIN.replace(layout=layout) for layout in ("dense", "packed", "cache")]
    assert len(set(layouts)) == 3
    assert [one.kind for one in layouts] == ["forward", "forward", "decode"]
    assert str(layouts[2]) == "B=2 Tq=64 Hq=8 Hkv=4 D=32 Dv=16 float16 on cuda, contiguous, up to 96 keys"


@pytest.mark.parametrize(
    ("old", "new", "value"), [("processors", "num_sms", 78), ("addressable", "tma_compatible", False)]
)
def test_old_names_of_fields_warn(old: str, new: str, value: object) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated; use {new}"):
        assert PLAIN.replace(**{old: value}) == PLAIN.replace(**{new: value})


def test_the_old_name_of_replace_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"use Problem\.replace"):
        assert PLAIN._replace(backward=True) == PLAIN.replace(backward=True)
