"""The decorator of calls at which torch.compile breaks its graph: strategies are generators, which cannot be traced."""

from __future__ import annotations

from ..base.graph_break import graph_break as graph_break_because

graph_break = graph_break_because("it communicates with other ranks")
