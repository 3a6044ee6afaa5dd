"""Plans from the command line: shapes in, the words of explain() out, for devices that need not be here."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from stream_attention import explain
from stream_attention.dispatch.plan import plan
from stream_attention_tools.cli import plan as cli

needs_triton = pytest.mark.usefixtures("_triton")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture
def _triton() -> None:
    pytest.importorskip("triton")


def lines(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert cli.main(argv) == 0
    return capsys.readouterr().out.splitlines()


# What it plans


def test_it_prints_what_explain_prints_for_the_tensors_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    query, key = torch.zeros(2, 24, 4, 16, requires_grad=True), torch.zeros(2, 40, 2, 16)
    value = torch.zeros(2, 40, 2, 8)
    options = {"mask": torch.ones(24, 40, dtype=torch.bool), "bias": torch.zeros(1, 4, 1, 40, dtype=torch.float16)}
    options |= {"alibi_slopes": torch.zeros(4, requires_grad=True), "sink": torch.zeros(4)}
    explain(
        query,
        key,
        value,
        causal=True,
        window=(9, -1),
        softcap=2.5,
        scale=0.5,
        dropout_p=0.25,
        deterministic=True,
        return_lse=True,
        **options,
    )
    expected = capsys.readouterr().out.splitlines()
    argv = "--device cpu --q 2x24x4x16 --kv 2x40x2x16 --value-dim 8 --dtype fp32 --mask 24x40 --bias 1x4x1x40:fp16"
    argv += " --alibi --sink --causal --window 9,-1 --softcap 2.5 --scale 0.5 --dropout 0.25 --deterministic"
    assert lines(capsys, *argv.split(), "--return-lse", "--backward") == [*expected, "device    the CPU"]
    words = "causal|window|mask|bias=float16|alibi|sink|softcap=2.5|scale=0.5|dropout=0.25|deterministic|Dv=8"
    missing = [word for word in words.split("|") if word not in expected[0]]
    assert missing == ["causal"]  # which is part of the window it prints
    assert "with a gradient through the LSE" in "\n".join(expected)


@needs_triton
@pytest.mark.usefixtures("hopper_triton")
@pytest.mark.parametrize("count", [[], ["--processors", "132"]], ids=["H200's", "told"])
def test_a_gpu_that_is_not_here_is_planned_by_its_compute_capability(
    count: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--q", "1x4096x32x128", "--kv", "1x4096x8x128", "--arch", "90", "--causal", "--backward", *count]
    forward, its_config, backward, backward_config, device = lines(capsys, *argv)
    assert "Tq=4096 Tk=4096 Hq=32 Hkv=8 D=128 Dv=128 bfloat16 on cuda" in forward and forward.endswith("causal")
    assert its_config.startswith("backend   gluon: 2 warpgroups of 64 queries")
    assert backward == "backward  of the same call"
    assert backward_config.startswith("backend   gluon: one pass, tiles of 128 keys")
    assert device.startswith("device    a GPU of compute capability 9.0 with 132 multiprocessors")


@needs_triton
@pytest.mark.usefixtures("hopper_triton")
@pytest.mark.parametrize(("arch", "config"), [("90", "gluon: 2 warpgroups of "), ("89", "triton: tiles of 128 x 64")])
def test_a_call_in_fp8_is_planned_for_a_gpu_that_is_not_here(
    arch: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--q", "1x4096x16x128", "--causal", "--arch", arch, "--precision", "fp8"]
    forward, its_config, *passed_over, device = lines(capsys, *argv)
    assert forward.endswith("bfloat16 on cuda scale=0.0883883 causal in fp8")
    assert its_config.startswith(f"backend   {config}")
    assert [line.split(":")[0] for line in passed_over] == ["not       gluon"] * (arch == "89")
    assert device.startswith(f"device    a GPU of compute capability {int(arch) / 10}")


@needs_triton
def test_processors_decide_how_keys_are_split(capsys: pytest.CaptureFixture[str]) -> None:
    decoding = ["--q", "1x1x8x128", "--kv", "1x65536x8x128", "--arch", "90"]
    assert "keys in 16 splits" in lines(capsys, *decoding)[1]
    assert "keys in 2 splits" in lines(capsys, *decoding, "--processors", "16")[1]


@needs_triton
@pytest.mark.parametrize("known", list(cli.GPUS))
def test_every_gpu_of_the_table_runs_triton(known: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, "--q", "1x1024x8x64", "--arch", str(known))[1].startswith("backend   triton: tiles of ")


@needs_triton
def test_an_old_gpu_is_passed_over_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for count, having in ((["--processors", "40"], " with 40 multiprocessors"), ([], "")):  # nobody asks how many
        printed = lines(capsys, "--q", "1x1024x8x64", "--arch", "75", *count)
        assert printed[1].startswith("backend   eager: ")
        assert printed[2].startswith("not       gluon: ") and "(compute capability 9.0); got 7.5" in printed[2]
        assert printed[3].startswith("not       triton: ") and "compute capability 8.0 or newer; got 7.5" in printed[3]
        assert printed[4:] == [f"device    a GPU of compute capability 7.5{having}"]


def test_a_terabyte_is_planned_without_being_allocated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Tq=1073741824" in lines(capsys, "--q", "8x1073741824x32x128", "--device", "cpu")[0]


def test_the_backend_is_the_one_that_was_named(capsys: pytest.CaptureFixture[str]) -> None:
    printed = lines(capsys, "--q", "1x8x2x8", "--device", "cpu", "--backend", "reference")
    assert printed[1] == "backend   reference: dense, fp64" and len(printed) == 3


def test_it_is_a_module_too() -> None:
    argv = [sys.executable, "-m", "stream_attention.cli.plan", "--q", "1x8x2x8", "--device", "cpu", "--dtype", "fp32"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[1] == "backend   eager: torch's CPU flash op"


@pytest.mark.gpu
def test_the_gpu_that_is_here_is_planned_by_its_own_facts(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = [torch.empty(1, 2048, 8, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    planned = explain(*tensors)
    capsys.readouterr()
    printed = lines(capsys, "--q", "1x2048x8x64", "--device", "cuda")
    assert printed[:-1] == str(plan(planned.problem)).splitlines()
    assert torch.cuda.get_device_name() in printed[-1]


# What it refuses


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--q 4096x128", "query: expected shape [B, Tq, Hq, D]; got [4096, 128]"),
        ("--q 1x64x8x64 --kv 1x64x3x64", "query: expected a multiple of the 3 KV heads"),
        ("--q 1x64x8x64 --mask 5x64", "mask: expected broadcastable to [B, Hq, Tq, Tk] = [1, 8, 64, 64]; got [5, 64]"),
        ("--q 1x64x8x64 --dropout 1", "dropout_p: expected a probability in [0, 1); got 1.0"),
        ("--q 1x64x8x64 --backend fast", "backend: expected one of 'auto'"),
        ("--q 1x64x8x64 --backend triton --arch 75", "compute capability 8.0 or newer"),
        ("--q 1x64x8x64 --arch 90 --device cpu", "--arch and --processors: expected with --device cuda"),
        ("--q 1x64x8x64 --arch 87", "--processors: expected the multiprocessors of a GPU of --arch 87; got none"),
        ("--q 1x64x8x64 --precision fp8 --backward", "--backward: expected without --precision fp8, which is for inf"),
        ("--q 1x64x8x64 --precision fp8 --dtype fp32", "query: expected dtype float16 or bfloat16 with precision"),
        ("--q 1x64x8x64 --precision fp8 --mask 64x64", 'mask: expected None with precision="fp8"; got a tensor'),
        ("--q 1x64x8x96 --precision fp8", 'query: expected D = Dv of 64, 128 or 256 with precision="fp8"'),
        (
            "--q 1x64x8x64 --precision fp8 --arch 86",
            "FP8 requires Triton and a GPU with compute capability 8.9",
        ),
        (
            "--q 1x64x8x64 --precision fp8 --device cpu",
            "FP8 requires Triton and a GPU with compute capability 8.9",
        ),
        ("--q 9999999999x9999999999x8x64", "expected fewer than 2**59 elements"),
        pytest.param("--q 1x64x8x64 --device cuda", "got neither. Say --arch 90", marks=no_gpu),
        pytest.param("--q 1x64x8x64 --processors 132", "got neither. Say --arch 90", marks=no_gpu),
    ],
)
def test_a_call_that_would_be_refused_is_refused(argv: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--backend triton" in argv:
        pytest.importorskip("triton")
    assert cli.main(argv.split()) == 2
    said = capsys.readouterr()
    assert words in said.err and said.out == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", "--q"),
        ("--q 1,64,8,64", "expected sizes joined by x, such as 1x4096x32x128; got '1,64,8,64'"),
        ("--q 1x64x8x-64", "expected sizes joined by x"),
        ("--q 1x64x8x64 --dtype int8", "argument --dtype"),
        ("--q 1x64x8x64 --precision bf16", "expected fp8, or no --precision for that of --dtype; got 'bf16'"),
        ("--q 1x64x8x64 --bias 64x64:int8", "expected SHAPE or SHAPE:DTYPE"),
        ("--q 1x64x8x64 --window 5", "expected two ints LEFT,RIGHT, such as 1023,0; got '5'"),
        (
            "--q 1x64x8x64 --window -1,0",
            "expected one argument; one that begins with a minus is written with the = sign",
        ),
        ("--q 1x64x8x64 --arch 9", "expected a compute capability without its dot, 90 for 9.0; got '9'"),
        ("--q 1x64x8x64 --arch 9.0", "90 for 9.0; got '9.0'"),
        ("--q 1x64x8x64 --arch 90 --processors 0", "expected a number of at least 1; got '0'"),
        ("--q 1x64x8x64 --value-dim 0", "expected a number of at least 1; got '0'"),
        ("--q 1x64x8x64 --casual", "unrecognized arguments: --casual"),
    ],
)
def test_words_it_cannot_read_are_refused(argv: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(argv.split())
    assert left.value.code == 2
    assert words in capsys.readouterr().err
