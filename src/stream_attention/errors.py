"""Exceptions of the library. Bad input is a plain `ValueError` or `TypeError`; see validate.py."""

from __future__ import annotations


class UnsupportedProblem(ValueError):
    """The backend that was asked for by name cannot do this problem; the message says why."""
