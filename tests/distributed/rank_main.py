"""One rank of the pool in conftest.py: calls functions that it is sent, by file and name, and replies."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from stream_attention.distributed import initialize


def main() -> None:
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no reply
    torch.set_num_threads(1)

    def reply(result: Any, error: str = "", seconds: float = 0.0) -> None:
        pickle.dump((result, error, seconds), replies)
        replies.flush()

    groups, timeout_s, backend = pickle.load(requests)
    initialize(backend, timeout_s=timeout_s)
    made = {name: dist.new_group(list(ranks)) for name, ranks in groups.items()} | {"world": dist.group.WORLD}
    reply(None)
    modules: dict[str, Any] = {}
    while True:
        try:
            path, name, arguments = pickle.load(requests)
        except EOFError:
            return
        started = time.monotonic()
        try:
            if path not in modules:
                spec = importlib.util.spec_from_file_location(f"on_ranks_{len(modules)}", path)
                assert spec is not None and spec.loader is not None
                modules[path] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(modules[path])
            result, error = getattr(modules[path], name)(rank=dist.get_rank(), groups=made, **arguments), ""
        except Exception as raised:
            result, error = None, f"{type(raised).__name__}: {raised}"
        reply(result, error, time.monotonic() - started)


if __name__ == "__main__":
    main()
