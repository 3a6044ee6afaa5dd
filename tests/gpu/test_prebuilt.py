"""Machine code that a wheel carries: built here, loaded by a driver that is made up."""

from __future__ import annotations

import importlib.util
import json
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from sass_gate import fingerprint

import pretend_gpu
from stream_attention.backends.installed import interpreting

if interpreting():
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from stream_attention.backends.hopper import forward_sm90
from stream_attention.gpu import driver, launch, prebuilt
from stream_attention_tools.testing.offline import disassemble
from tools import prebuild

CALL = "bf16 d128 causal 1x4096"
FUNCTION = 77


@pytest.fixture(scope="module")
def name() -> str:
    """The forward kernel of a call, by the name that a launch looks for."""
    names = prebuild.wanted([call for call in prebuild.common() if call.name == CALL])
    (found,) = [name for name in names if "forward_sm90" in name]
    return found


@pytest.fixture(scope="module")
def built(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("machine_code")
    prebuild.build(folder, [(name, CALL)], workers=1)
    return folder


class Driver(pretend_gpu._Driver):
    """A driver that keeps what it is given to load, and lays parameters out as the host does."""

    def __init__(self, folder: Path, refuses: str = "") -> None:
        super().__init__(None, {})
        (self._entry,) = json.loads((folder / prebuilt.INDEX).read_text())["kernels"].values()
        self._refuses = refuses
        self.images: list[bytes] = []
        self.names: list[bytes] = []
        self.shared: list[int] = []

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:
        self.images.append(image)
        return int(self._refuses == "image")

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        self.names.append(name)
        function._obj.value = FUNCTION
        return int(self._refuses == "name")

    def cuFuncSetCacheConfig(self, function: Any, config: int) -> int:
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.shared.append(value)
        return int(self._refuses == "shared memory")

    def cuFuncGetParamInfo(self, function: Any, place: int, offset: Any, size: Any) -> int:
        maps = self._entry["metadata"]["tensordesc_meta"]
        laid = launch.Parameters(self._entry["signature"], maps, start=48).offsets
        if self._refuses == "parameters":
            laid = laid[:-1]
        if place == len(laid):
            return 1
        offset._obj.value, size._obj.value = laid[place]
        return 0


@pytest.fixture
def with_driver(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install the folder, a GPU of compute capability 9.0 and a driver; returns the driver."""

    def install(refuses: str = "", arch: int = 90, folder: Path = built) -> Driver:
        made = Driver(built, refuses)
        monkeypatch.setattr(prebuilt, "FOLDER", folder)
        monkeypatch.setattr(prebuilt, "arch", lambda device: arch)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        monkeypatch.setattr(driver, "_library", lambda: made)
        prebuilt.index.cache_clear()
        driver.address_word.cache_clear()
        return made

    yield install
    monkeypatch.undo()
    prebuilt.index.cache_clear()
    driver.address_word.cache_clear()


def kernel_and_key(name: str) -> tuple[launch.Kernel, tuple[Any, ...]]:
    """A fresh kernel that has compiled nothing, and the key of a launch on a GPU."""
    keys: list[tuple[Any, ...]] = []
    real = prebuilt.name_of

    def keep(kernel: Any, key: tuple[Any, ...]) -> str:
        if real(kernel, key) == name:
            keys.append(key)
        return real(kernel, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prebuilt, "name_of", keep)
        prebuild.wanted([call for call in prebuild.common() if call.name == CALL])
    kernel = launch.Kernel(forward_sm90._kernel.function, **forward_sm90._kernel.compile_options)
    return kernel, (torch.device("cuda", 0), *keys[0][1:])


def test_a_launch_finds_it(name: str, built: Path, with_driver: Any) -> None:
    made, (kernel, key) = with_driver(), kernel_and_key(name)
    found = kernel.find(key)
    assert found is not None and found.kernel.function == FUNCTION and found.parameters is not None
    assert kernel.find(key) is found and kernel.compiled[key] is found
    assert len(made.images) == 1 and made.images[0].startswith(b"\x7fELF") and made.names == [b"_forward_kernel"]
    assert made.shared == [found.kernel.metadata.shared] and made.shared[0] > 48 << 10
    assert kernel.find((*key[:1], 8, *key[2:])) is None, "a form that did not come along"


def test_it_is_the_machine_code_that_the_gates_check(built: Path) -> None:
    (entry,) = json.loads((built / prebuilt.INDEX).read_text())["kernels"].values()
    image = zlib.decompress((built / prebuilt.CODE).read_bytes())
    gates = Path(__file__).parents[1] / "backends" / "hopper" / "test_forward_compiled.py"
    spec = importlib.util.spec_from_file_location("hopper_gates", gates)
    assert spec is not None and spec.loader is not None
    gate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gate)
    _, _, sass = gate.compiled(gate.KERNELS["sm_90 bfloat16 d128 causal 4096"])
    assert fingerprint(disassemble(SimpleNamespace(asm={"cubin": image}))) == fingerprint(sass)
    assert b".version" not in image, "the text of the PTX"
    assert entry["size"] < 1 << 16


@pytest.mark.parametrize("what", ["image", "name", "shared memory", "parameters"])
def test_what_the_driver_refuses_is_compiled(what: str, name: str, with_driver: Any) -> None:
    made, (kernel, key) = with_driver(refuses=what), kernel_and_key(name)
    assert kernel.find(key) is None and not kernel.compiled
    assert kernel.find(key) is None and len(made.images) == 1, "it is asked once"


@pytest.mark.parametrize("why", ["other sources", "cut off", "not there", "other GPU", "off", "no GPU"])
def test_it_is_left_alone(why: str, name: str, built: Path, with_driver: Any, tmp_path: Path) -> None:
    for file in (prebuilt.INDEX, prebuilt.CODE):
        text = (built / file).read_bytes()
        if file == prebuilt.INDEX and why == "other sources":
            text = text.replace(prebuilt.sources().encode(), b"0" * 64)
        if file == prebuilt.INDEX and why == "cut off":
            text = text[:-40]
        if why != "not there":
            (tmp_path / file).write_bytes(text)
    made = with_driver(arch=100 if why == "other GPU" else 90, folder=tmp_path)
    kernel, key = kernel_and_key(name)
    if why == "off":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prebuilt, "ENABLED", False)
            assert kernel.find(key) is None
    elif why == "no GPU":
        assert kernel.find((torch.device("cpu"), *key[1:])) is None
    else:
        assert kernel.find(key) is None
    assert not made.images


def test_every_kind_of_call_is_compiled_ahead() -> None:
    names = " ".join(call.name for call in prebuild.common())
    for word in (
        "bf16 d64 full",
        "fp16 d128 causal",
        "bf16 d256 window",
        "packed",
        "fp8 d128",
        "decode d64",
        "paged",
        "int4",
    ):
        assert word in names


def test_a_word_that_no_call_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prebuild.main(["--only", "nothing like it"])
    assert "--only: expected a word of a call's name" in capsys.readouterr().err
