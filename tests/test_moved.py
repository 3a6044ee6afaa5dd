"""What moved to `stream_attention_tools` goes on under the names that it had before."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec

import pytest

from stream_attention import moved

pytestmark = pytest.mark.filterwarnings("ignore:stream_attention:DeprecationWarning")  # those not asked for

PUBLISHED = {
    "stream_attention.benchmark.fp8_error": "table",
    "stream_attention.benchmark.page": "write_page",
    "stream_attention.benchmark.results": "conditions",
    "stream_attention.benchmark.timing": "interleaved",
    "stream_attention.distributed.demo": "main",
    "stream_attention.testing": "check_case",
    "stream_attention.testing.inputs": "Case",
    "stream_attention.testing.memory": "peak_bytes",
    "stream_attention.testing.tolerance": "check_case",
    "stream_attention.tuning.search": "main",
}
"""Module -> one of its names, as README, docs, examples and learn/ showed them before they moved."""


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module is loaded under an old name yet."""
    for name in [name for name in sys.modules if moved.new_name(name)]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("old", PUBLISHED)
def test_an_old_name_is_the_same_object_and_says_what_to_write(old: str, unloaded: None) -> None:
    new = moved.new_name(old)
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated: it moved to {new}$"):
        before = import_module(old)
    after = import_module(new)
    assert getattr(before, PUBLISHED[old]) is getattr(after, PUBLISHED[old])
    assert before.__doc__ == after.__doc__


def test_the_warning_is_of_the_line_that_imports(unloaded: None) -> None:
    with pytest.warns(DeprecationWarning, match=r"memory is deprecated") as warned:
        from stream_attention.testing.memory import peak_bytes  # noqa: F401
    assert {warning.filename for warning in warned} == {__file__}


def test_what_there_is_not_is_an_error_that_names_it(unloaded: None) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'stream_attention\.testing\.nothing'"):
        import_module("stream_attention.testing.nothing")
    with pytest.raises(ImportError, match=r"cannot import name 'nothing' from 'stream_attention\.testing'"):
        from stream_attention.testing import nothing  # noqa: F401
    with pytest.raises(AttributeError, match="nothing"):
        _ = import_module("stream_attention.testing").nothing


@pytest.mark.parametrize("old", moved.MOVED)
def test_the_table_is_of_modules_that_are_there_under_the_new_name_alone(old: str) -> None:
    assert find_spec(moved.MOVED[old]) is not None
    others = [finder for finder in sys.meta_path if not isinstance(finder, moved.OldNames)]
    path = import_module(old.rpartition(".")[0]).__path__
    specs = [finder.find_spec(old, path) for finder in others]
    assert not [spec for spec in specs if spec is not None and spec.loader is not None]


@pytest.mark.parametrize(
    "command", ["cli.plan --q 1x8x2x8 --device cpu", "cli.main plan --q 1x8x2x8 --device cpu", "tuning.search --help"]
)
def test_python_m_runs_an_old_name(command: str) -> None:
    argv = [sys.executable, "-m", *f"stream_attention.{command}".split()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout and not done.stderr, done


def test_python_m_ends_as_the_command_does() -> None:
    argv = [sys.executable, "-m", "stream_attention.cli.plan", "--no-such-flag"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m stream_attention.cli.plan ")


def test_the_commands_are_not_deprecated(unloaded: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = import_module("stream_attention.cli.main")
    assert before.main is import_module("stream_attention_tools.cli.main").main


@pytest.mark.parametrize(
    ("old", "name"), [("core.flashattention_v3", "FlashAttentionV3"), ("utils.profiler", "MemoryProfiler")]
)
def test_instruments_that_users_know_by_their_old_names_are_not_deprecated(old: str, name: str, unloaded: None) -> None:
    old = f"stream_attention.{old}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = import_module(old)
    assert getattr(before, name) is getattr(import_module(moved.MOVED[old]), name)


def test_other_names_are_not_looked_at() -> None:
    assert moved.new_name("stream_attention.ops.attention") is None
    assert moved.new_name("stream_attention.testing_more") is None
    assert moved.new_name("stream_attention.testing.a.b") == "stream_attention_tools.testing.a.b"


def test_one_finder_however_often_the_package_is_imported() -> None:
    moved.install()
    assert sum(isinstance(finder, moved.OldNames) for finder in sys.meta_path) == 1
