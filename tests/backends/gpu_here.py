"""A GPU that experiments may run for, and that is not here."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch

from stream_attention.backends import probe


def pretend_here(monkeypatch: pytest.MonkeyPatch, arch: int = 90, name: str = "NVIDIA H200") -> None:
    """An experiment may run for `cuda:0`, which is not here: it gets no stream."""
    for target, attribute, value in (
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "get_device_name", lambda device: name),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "device", nullcontext),
        (torch.cuda, "stream", nullcontext),
        (torch.cuda, "Stream", lambda device: None),
        (torch.cuda, "get_sync_debug_mode", lambda: 0),
        (torch.cuda, "set_sync_debug_mode", lambda mode: warnings.warn("a prototype feature", stacklevel=2)),
        (probe, "arch", lambda device: arch if device.type == "cuda" else 0),
        (probe, "_answers", {}),
    ):
        monkeypatch.setattr(target, attribute, value)
