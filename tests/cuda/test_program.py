"""dist_flash_attn: its flags, what it prints, what it says when something is wrong. And the machine code of a build."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cuda.cuda_library import CudaLibrary

ROOT = Path(__file__).parents[2]


def program(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([folder / "dist_flash_attn", *flags], capture_output=True, text=True, timeout=120)


SMALL = ("--transport", "copy", "--warmup", "0", "--iters", "1")


class TestEmulated:
    """The whole program on the CPU: one device, every time is 1 ms."""

    def test_prints_times_speed_up_difference_and_memory(self, emulated_folder: Path) -> None:
        done = program(emulated_folder, "--seq", "100", "--gpus", "3", "--check", "--causal", *SMALL)
        assert done.returncode == 0, done.stderr
        first, *lines = done.stdout.splitlines()
        assert first == "batch 1, heads 1, seq 100, dim 64, fp32, causal; ring of 3, copy"
        titles = ["single-GPU forward", "multi-GPU forward", "speed-up", "max |single - multi|", "memory per GPU"]
        for title, line in zip([*titles, "max |single - fp64|"], lines, strict=True):
            assert line.startswith(title)

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    @pytest.mark.parametrize("strategy", ["ring", "queries"])
    def test_json(self, emulated_folder: Path, dtype: str, strategy: str) -> None:
        flags = "--seq 65 --dim 32 --heads 2 --batch 2 --gpus 3 --check --json".split()
        done = program(emulated_folder, *flags, "--dtype", dtype, "--strategy", strategy, *SMALL)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert [found[name] for name in ("seq", "dim", "heads", "batch", "gpus")] == [65, 32, 2, 2, 3]
        assert found["dtype"] == dtype and found["strategy"] == strategy and found["causal"] is False
        assert found["single_ms"] == found["multi_ms"] == found["speedup"] == 1.0
        assert found["single_tflops"] == pytest.approx(4e-9 * 2 * 2 * 65 * 65 * 32)
        assert found["single_bytes"] == 4 * 2 * 65 * 2 * 32 * (4 if dtype == "fp32" else 2)
        assert found["max_abs_difference"] <= found["limit"] == (1e-5 if dtype == "fp32" else 1e-2)
        assert found["check"]["every"] == 1 and 0 < found["check"]["multi_error"] <= found["limit"]

    def test_defaults(self, emulated_folder: Path) -> None:
        done = program(emulated_folder)
        assert done.returncode == 2
        assert "--gpus: expected at most the 1 here; got 2. --transport copy runs that many ranks" in done.stderr
        usage = program(emulated_folder, "--help").stdout
        for flag, default in (("seq L", 1024), ("dim D", 64), ("gpus N", 2), ("warmup W", 5), ("iters I", 20)):
            assert re.search(rf"--{flag} .*\({default}\)", usage)

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ("--head 3", "--head: no such flag"),
            ("--seq", "--seq: expected a value after it"),
            ("--seq 12x", "--seq: expected an integer from 1 to 2^30; got '12x'"),
            ("--seq 0", "--seq: expected an integer from 1"),
            ("--gpus -1", "--gpus: expected an integer from 1 to 64"),
            ("--iters 0", "--iters: expected an integer from 1"),
            ("--dtype fp16", "--dtype: expected fp32 or bf16; got 'fp16'"),
            ("--transport mpi", "--transport: expected nccl or copy; got 'mpi'"),
            ("--strategy star", "--strategy: expected ring or queries; got 'star'"),
            ("--dim 20", "dim: expected a multiple of 8 from 8 to 128; got 20"),
            ("--gpus 65 --transport copy", "--gpus: expected an integer from 1 to 64; got '65'"),
        ],
    )
    def test_refused(self, emulated_folder: Path, flags: str, words: str) -> None:
        done = program(emulated_folder, *flags.split())
        assert done.returncode == 2 and done.stdout == ""
        assert words in done.stderr

    def test_the_python_of_the_page_runs(self, emulated_folder: Path) -> None:
        (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "cuda" / "README.md").read_text(), re.DOTALL)
        names: dict[str, Any] = {}
        exec(code.replace("cuda/build", str(emulated_folder)).replace('device="cuda"', 'device="cpu"'), names)
        torch.testing.assert_close(names["out"], names["again"], rtol=0.0, atol=1e-6)

    def test_more_than_the_host_holds_is_said(self, emulated_folder: Path) -> None:
        done = program(emulated_folder, "--seq", str(1 << 30), "--heads", "4096", *SMALL)
        assert done.returncode == 1
        assert "out of memory on the host: Q, K, V and two results take 5.63e+06 GB there" in done.stderr


@pytest.mark.xdist_group("cuda built")  # by one worker alone
class TestBuilt:
    """What nvcc makes of it, without a GPU."""

    def test_no_gpu_is_said_and_the_call_is_named(self, built_folder: Path) -> None:
        if torch.cuda.is_available():
            pytest.skip("a GPU is here")
        done = program(built_folder, "--transport", "copy")
        assert done.returncode == 1
        assert re.search(r"cudaGetDeviceCount\(&present\): .+ \(main\.cpp:\d+\)", done.stderr)
        if "insufficient" in done.stderr:  # CUDA's words where there is no driver
            assert "; no GPU is here, or its driver is older than this CUDA (main.cpp" in done.stderr
        x = torch.ones(1, 2, 1, 32)
        library = CudaLibrary(built_folder / "libflash_attn.so")
        words = r"flash_attn_group_create: cudaGetDeviceCount\(&present\)"
        with pytest.raises(RuntimeError, match=words), library.group(x, x, x, ranks=2):
            pass

    def test_tensors_on_the_cpu_are_refused(self, built_folder: Path) -> None:
        x = torch.ones(1, 2, 1, 32)
        with pytest.raises(ValueError, match="query: expected a tensor on a GPU, the same for all; got one on cpu"):
            CudaLibrary(built_folder / "libflash_attn.so").forward(x, x, x)

    def test_the_library_shows_its_functions_and_nothing_else(self, built_folder: Path) -> None:
        command = ["nm", "-D", "--defined-only", built_folder / "libflash_attn.so"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[2::3]
        header = (ROOT / "cuda" / "include" / "flash_attn.h").read_text()
        assert set(shown) == set(re.findall(r"\b(flash_attn_\w+)\(", header))

    def test_installed_it_links_with_c(self, built_folder: Path, tmp_path: Path) -> None:
        command = ["cmake", "--install", built_folder, "--prefix", tmp_path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert program(tmp_path / "bin", "--help").returncode == 0
        source = tmp_path / "shard.c"
        source.write_text(
            "#include <flash_attn.h>\n#include <stdio.h>\n"
            'int main(void) { printf("%d", flash_attn_shard(10, 3, 1).start); return 0; }\n'
        )
        (libraries,) = tmp_path.glob("lib*")
        flags = [f"-I{tmp_path}/include", f"-L{libraries}", "-lflash_attn", f"-Wl,-rpath,{libraries}"]
        done = subprocess.run(["gcc", source, *flags, "-o", tmp_path / "shard"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert subprocess.run([tmp_path / "shard"], capture_output=True, text=True).stdout == "4"

    def test_the_header_is_c(self) -> None:
        header = ROOT / "cuda" / "include" / "flash_attn.h"
        command = ["gcc", "-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", "-x", "c", header]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def test_wrong_flags_are_refused_before_a_gpu_is_looked_for(self, built_folder: Path) -> None:
        assert program(built_folder, "--dim", "20").returncode == 2

    @pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
    def test_machine_code(self, built_folder: Path, arch: str) -> None:
        """No stack, so no spills; asynchronous copies; as many products per load as cuda/README.md counts."""
        triton = pytest.importorskip("triton")
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        library = built_folder / "libflash_attn.so"
        usage = subprocess.run([tool, "--dump-resource-usage", "-arch", arch, library], capture_output=True, text=True)
        used = re.findall(r"Function \S*?(flash_\w{4})_kernelILi(\d+)\S*:\s+REG:(\d+) STACK:(\d+)", usage.stdout)
        kernels = {(name, D) for name in ("flash_fp32", "flash_bf16") for D in (32, 64, 128)}
        assert {(name, int(D)) for name, D, _, _ in used} == kernels
        assert all(int(registers) <= 255 and stack == "0" for _, _, registers, stack in used), used

        dump = subprocess.run([tool, "-sass", "-arch", arch, library], capture_output=True, text=True).stdout
        counts: dict[tuple[str, int], Counter[str]] = {}
        for function in dump.split("Function : ")[1:]:
            found = re.match(r"\S*?(flash_\w{4})_kernelILi(\d+)", function)
            assert found is not None
            names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+(?:\.128)?)", function)
            counts[found[1], int(found[2])] = Counter(names)
        for (name, D), count in counts.items():
            assert count["LDGSTS"] > 0
            if name == "flash_bf16":
                assert (count["HMMA"], count["LDSM"]) == (2 * D, 10 * D // 16)  # per tile of 64 keys and warp
            else:
                assert count["FFMA"] >= 14 * count["LDS.128"] > 0
