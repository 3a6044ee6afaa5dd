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


def main(names: list[str]) -> None:
    import torch
    from test_forward_gpu import NAMED  # the one beside this file: a script's own folder comes first

    from stream_attention.testing.inputs import make, run

    for name in names or SAMPLE:
        query, key, value, options = make(NAMED[name])
        out, _ = run(NAMED[name], {"query": query, "key": key, "value": value}, options, "gluon")
        torch.cuda.synchronize()
        print(f"{name}: {tuple(out.shape)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
