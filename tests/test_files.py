"""write_file: a file is there whole, or as it was; with the mode and the place that a plain write would give it."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from stream_attention_tools.files import check_writable, save_figure, write_file

ROOT = Path(__file__).resolve().parents[1]


def test_text_bytes_and_what_a_function_writes(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file"
    for content, expected in (
        ("ä\n", "ä\n".encode()),
        (b"\x00", b"\x00"),
        (lambda file: file.write(b"by it"), b"by it"),
    ):
        write_file(path, content)
        assert path.read_bytes() == expected
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("no room"), KeyboardInterrupt()], ids=repr)
def test_what_fails_half_way_leaves_the_old_file_and_nothing_beside_it(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def breaks(file: IO[bytes]) -> None:
        file.write(b"new")
        raise error

    with pytest.raises(type(error)):
        write_file(path, breaks)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


LIMITED = """
import resource, sys
from stream_attention_tools.files import write_file
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_file(sys.argv[1], "x" * 2000)
except OSError as error:
    print(error.strerror)
"""


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the write itself fails."""
    (tmp_path / "file").write_text("old")
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "File too large\n", done.stderr
    assert (tmp_path / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_new_file_gets_the_mode_of_a_plain_write_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        (tmp_path / "plain").write_text("")
        write_file(tmp_path / "file", "new")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"plain": 0o640, "file": 0o640}
    (tmp_path / "file").chmod(0o604)
    write_file(tmp_path / "file", "newer")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o604


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("old")
    (tmp_path / "link").symlink_to("kept/file")
    write_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "kept" / "file").read_text() == "new"
    (tmp_path / "dangling").symlink_to("kept/none")
    write_file(tmp_path / "dangling", "new")
    assert (tmp_path / "kept" / "none").read_text() == "new"


def test_a_device_and_a_pipe_are_written_to_and_stay() -> None:
    write_file(os.devnull, "gone")
    assert not Path(os.devnull).is_file()
    code = "from stream_attention_tools.files import write_file; write_file('/dev/stdout', 'said')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "said", done.stderr


@pytest.mark.parametrize("call", [check_writable, lambda path: write_file(path, "new")], ids=["check", "write"])
def test_where_nothing_can_be_written_the_path_is_named(call: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):  # root may write anywhere but in here
        folder = Path("/proc/self").resolve()
    refused: dict[Path, type[OSError]] = {tmp_path: IsADirectoryError, tmp_path / "file" / "below": NotADirectoryError}
    for path, error in (refused | {folder / "file": OSError}).items():
        with pytest.raises(error) as caught:
            call(path)
        assert caught.value.filename in (str(path), str(path.parent)) and caught.value.strerror
    assert (tmp_path / "file").read_text() == "old"


def test_a_file_that_may_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new" / "file")
    assert (tmp_path / "file").read_text() == "old" and list((tmp_path / "new").iterdir()) == []


def test_figures_end_as_their_names_do(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for name in ("a.png", "b.svg", "c"):
        save_figure(figure, tmp_path / name, dpi=50)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.svg", "c.png"]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (tmp_path / "b.svg").read_text()


ELSEWHERE = {
    "src/stream_attention_tools/files.py": "here",
    "src/stream_attention/backends/probe.py": "what an experiment found, and an empty file that is locked",
    "src/stream_attention/masks/drawing.py": "a picture that a user asks for: the library imports no tools",
    "src/stream_attention_tools/launchers.py": "into a temporary folder, for the compiler",
    "src/stream_attention_tools/testing/offline.py": "into a temporary folder, for the disassembler",
    "src/stream_attention_tools/report/figures.py": "into memory, for a page",
    "src/stream_attention_tools/bench/providers/flash_attention.py": "unpacks a library into a temporary folder",
    "learn/12_hopper/hopper.py": "into a temporary folder, for the disassembler",
    "tools/environment.py": "a part of a virtual environment",
    "tools/fresh.py": "the log of a clone that is thrown away",
    "tools/prebuild.py": "machine code, into a folder of the source tree",
    "tools/gpu_tests.py": "logs, and sums of what several processes found: it runs without the tools package",
}
"""Files that write otherwise, and what."""


def writes(call: ast.Call) -> bool:
    name = ast.unparse(call.func).split(".")[-1]
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    modes = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return name in ("write_text", "write_bytes", "savefig", "to_csv") or (
        name == "open" and any(re.fullmatch("[wax]b?", mode) for mode in modes)
    )


def test_everything_that_writes_a_result_writes_it_so() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for top in ("src", "benchmarks", "tools", "examples", "learn")
        for path in (ROOT / top).rglob("*.py")
        if any(isinstance(node, ast.Call) and writes(node) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert found == set(ELSEWHERE)
