"""The decorator of calls at which torch.compile breaks its graph: strategies are generators, which cannot be traced."""

from __future__ import annotations

from ..base.graph_break import uncompiled

graph_break = uncompiled("it communicates with other ranks")
