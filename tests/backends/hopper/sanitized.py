"""A sample of calls for `compute-sanitizer`, which watches every access to memory: `make sanitize`, on a GPU.

Lengths that are no multiples of a tile, packs with an empty sequence, every way to store. Nothing is compared here.
"""

from __future__ import annotations

import sys

SAMPLE = (
    "aligned",
    "d64",
    "d256",
    "d192 and 128",
    "a window behind which keys are unseen",
    "everything",
    "packed causal",
)
SAMPLE_OF_GRADIENTS = (
    "d128 aligned",
    "d64 causal",
    "d256 causal",
    "d128 a window behind which keys are unseen",
    "d128 everything",
    "d64 packed",
    "d128 in one order, packed",
)


def main(names: list[str]) -> None:
    """`--backward` for gradients; then names of cases of the tests, or nothing for the sample."""
    import torch
    from test_backward_gpu import NAMED as OF_GRADIENTS  # beside this file: a script's own folder comes first
    from test_forward_gpu import NAMED

    from stream_attention_tools.testing.inputs import make, run

    backward = "--backward" in names
    named, sample = (OF_GRADIENTS, SAMPLE_OF_GRADIENTS) if backward else (NAMED, SAMPLE)
    for name in [name for name in names if name != "--backward"] or sample:
        query, key, value, options = make(named[name])
        tensors = {"query": query, "key": key, "value": value}
        leaves = {name: t.requires_grad_(backward) for name, t in tensors.items()}
        out, _ = run(named[name], leaves, options, "gluon")
        if backward:
            out.backward(torch.ones_like(out))
        torch.cuda.synchronize()
        print(f"{name}: {tuple(out.shape)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
