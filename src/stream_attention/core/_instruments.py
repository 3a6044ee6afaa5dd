"""What the modules measure and plan by, which is no part of this package."""

from importlib import import_module
from typing import Any


def instruments() -> Any:
    """The module with the bodies of such methods, found by `moved` and imported when one is called."""
    return import_module("._measure", __package__)
