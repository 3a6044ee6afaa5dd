"""The kernel that folds one state into another, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from stream_attention import merge_states
from stream_attention.backends.installed import interpreting
from stream_attention.ops.merge import fold_state

pytestmark = pytest.mark.skipif(not interpreting(), reason="TRITON_INTERPRET=1 is not set: `make test` runs these")


@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 5, 3, 40), (1, 33, 4, 128), (3, 7, 2, 256)], ids=str)
def test_it_is_the_merge_in_place(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Into rows of larger tensors; empty states on either side, both and none, whatever they hold; other rows stay."""
    batch, q_len, heads, dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    whole, more = (torch.randn(batch, t, heads, dim, generator=generator) for t in (q_len + 6, q_len))
    whole_lse, more_lse = (10 * torch.randn(batch, heads, t, generator=generator) for t in (q_len + 6, q_len))
    rows = slice(4, 4 + q_len)
    for side, side_lse, every in ((whole[:, rows], whole_lse[..., rows], 3), (more, more_lse, 4)):
        empty = torch.arange(side_lse.numel()).view(side_lse.shape) % every == 1
        side_lse[empty] = -torch.inf
        side.transpose(1, 2)[empty] = torch.nan
    more_lse.view(-1)[0] += 500  # far from the other
    out, lse = merge_states([whole[:, rows], more], [whole_lse[..., rows], more_lse])
    before = whole.clone(), whole_lse.clone()
    from stream_attention.gpu import merge as kernels

    launched: list[int] = []
    monkeypatch.setattr(kernels, "launch_fold", _noted(kernels.launch_fold, launched))
    fold_state(whole[:, rows], whole_lse[..., rows], more, more_lse)
    assert launched, "torch did it"
    torch.testing.assert_close(whole[:, rows], out, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(whole_lse[..., rows], lse, rtol=2e-6, atol=2e-6)
    for others in (slice(0, 4), slice(4 + q_len, None)):
        assert torch.equal(
            whole[:, others],
            before[0][:, others],
        )
        assert torch.equal(whole_lse[..., others], before[1][..., others])


def _noted(function: object, calls: list[int]) -> object:
    def noting(*arguments: torch.Tensor) -> None:
        calls.append(1)
        function(*arguments)  # type: ignore[operator]

    return noting
