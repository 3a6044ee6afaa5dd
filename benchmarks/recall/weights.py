"""Weights as a safetensors file: eight bytes with the length of a JSON header, that header, then the raw numbers.

Enough of the format for one small file of fp32 tensors, which any other reader of safetensors reads too.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stream_attention_tools.files import write_file

WEIGHTS = Path(__file__).with_name("recall.safetensors")


def save(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path) -> None:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    data = bytearray()
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name}: expected float32; got {tensor.dtype}.")
        raw = struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist())
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers begin at a multiple of 8
    write_file(path, struct.pack("<Q", len(text)) + text + data)


def load(path: Path = WEIGHTS) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name, and the metadata."""
    raw = path.read_bytes()
    begin = 8 + struct.unpack_from("<Q", raw)[0]
    header = json.loads(raw[8:begin])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] != "F32":
            raise ValueError(f"{path.name}: expected tensors of F32; got {entry['dtype']} in {name}.")
        numbers = struct.unpack_from(f"<{math.prod(entry['shape'])}f", raw, begin + entry["data_offsets"][0])
        tensors[name] = torch.tensor(numbers).reshape(entry["shape"])
    return tensors, metadata
