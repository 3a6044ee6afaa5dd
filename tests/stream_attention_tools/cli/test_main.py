"""One command with all the others under it."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

import stream_attention
from stream_attention_tools.cli import main as cli


def test_help_lists_every_command_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    printed = capsys.readouterr().out
    assert left.value.code == 0
    for name, (_, line) in cli.COMMANDS.items():
        assert any(row.split() == [name, *line.split()] for row in printed.splitlines())


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"stream-attention {stream_attention.__version__}\n"


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_a_module(name: str) -> None:
    """Here, and under the name that the documents show: `python -m stream_attention.cli.info`."""
    for package in ("stream_attention_tools", "stream_attention"):
        assert find_spec(f"{package}.cli.{cli.COMMANDS[name][0]}") is not None


@pytest.mark.parametrize("name", ["info", "plan", "benchmark", "report"])
def test_a_command_gets_the_rest_of_the_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_a_command_is_called_by_the_name_it_was_called_by(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    assert capsys.readouterr().out.startswith("usage: stream-attention plan ")


def test_the_exit_code_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--q", "1x8x2x8", "--device", "cpu"]) == 0
    assert cli.main(["plan", "--q", "1x8", "--device", "cpu"]) == 2
    assert "stream-attention plan: query: expected shape" in capsys.readouterr().err


def test_commands_are_imported_when_they_run_and_not_before() -> None:
    names = [f"stream_attention_tools.cli.{module}" for module, _ in cli.COMMANDS.values()]
    probe = f"import sys, stream_attention_tools.cli.main\nprint([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "argv",
    [["info", "--no-check"], ["benchmark", "--list", "--device", "cpu"], ["plan", "--help"], ["--help"]],
    ids=str,
)
def test_a_command_whose_reader_has_gone_ends_quietly(argv: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "stream_attention.cli.main", *argv]
    with os.fdopen(writing) as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=120)
    codes = (0, 141) if "--help" in argv else (141,)  # argparse passes over what it cannot write
    assert done.returncode in codes and done.stderr == ""


@pytest.mark.parametrize(("argv", "got"), [([], "none"), (["inform"], "'inform'")])
def test_no_such_command_is_refused_with_those_there_are(
    argv: list[str], got: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2
    assert f"expected a command, one of {', '.join(cli.COMMANDS)}; got {got}" in capsys.readouterr().err
