"""Models of transformers that ask for FlashAttention run on ours, on a CPU, and give what they give with SDPA."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention.compat import flash_attn, flash_attn_interface, install
from tiny_models import SIZES, VOCABULARY

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.xdist_group("transformers"),
    pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed here"),
]

OLD = transformers.__version__ < "5"
LIBRARIES = {"flash_attention_2": ("flash_attn", flash_attn)}
if not OLD:  # transformers 4 refuses FlashAttention-3 on a CPU in words of its own
    LIBRARIES["flash_attention_3"] = ("flash_attn_interface", flash_attn_interface)
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 10, [0] * 9 + [1]])


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    for parameter in made.parameters():  # under the tiny weights of an initialisation attention does not matter
        torch.nn.init.uniform_(parameter, -0.3, 0.3) if parameter.dim() > 1 else None
    return made


@pytest.fixture(params=list(LIBRARIES))
def attention(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str]]]:
    """The name of an attention inside of `install`, and the names of our functions that are called."""
    name, module = LIBRARIES[request.param]
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for function in ("flash_attn_func", "flash_attn_varlen_func"):
            patch.setattr(module, function, counted(getattr(module, function), called))
        with install(name):
            yield request.param, called


def counted(function: Any, called: list[str]) -> Any:
    @functools.wraps(function)  # transformers looks at the signature
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        called.append(function.__name__)
        return function(*arguments, **keywords)

    return wrapper


def logits(model: Any, implementation: str, ids: Tensor, **more: Any) -> Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        found: Tensor = model(ids, **more).logits
    return found


def ids(rows: int = 3, length: int = 10) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def test_a_model_gives_what_it_gives_with_sdpa(model: Any, attention: tuple[str, list[str]]) -> None:
    name, called = attention
    torch.testing.assert_close(logits(model, name, ids()), logits(model, "sdpa", ids()), **CLOSE)
    assert called == ["flash_attn_func"] * 2


def test_padded_rows_are_packed(model: Any, attention: tuple[str, list[str]]) -> None:
    name, called = attention
    found = logits(model, name, ids(), attention_mask=MASK)
    wanted = logits(model, "sdpa", ids(), attention_mask=MASK)
    torch.testing.assert_close(found[MASK.bool()], wanted[MASK.bool()], **CLOSE)
    assert called == ["flash_attn_varlen_func"] * 2


def test_it_generates_the_same_tokens(model: Any, attention: tuple[str, list[str]]) -> None:
    name, called = attention
    found = []
    for implementation in (name, "sdpa"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(ids(), attention_mask=MASK, max_new_tokens=6, do_sample=False))
    assert torch.equal(*found) and len(called) == 12


def test_it_trains(model: Any, attention: tuple[str, list[str]]) -> None:
    grads = []
    for implementation in (attention[0], "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids(), labels=ids()).loss.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_the_checks_answer_as_before_behind_it(model: Any) -> None:
    """Also functions that were imported before: their answers were kept."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_greater_or_equal

    assert not is_flash_attn_2_available() and not is_flash_attn_greater_or_equal("2.1.0")
    with install("flash_attn"):
        assert is_flash_attn_2_available() and is_flash_attn_greater_or_equal("2.1.0")
        assert not is_flash_attn_greater_or_equal("2.9.0")
        model.set_attn_implementation("flash_attention_2")
    assert not is_flash_attn_2_available() and not is_flash_attn_greater_or_equal("2.1.0")
    model.set_attn_implementation("sdpa")
    with pytest.raises((ImportError, ValueError), match="Flash"):
        model.set_attn_implementation("flash_attention_2")


def test_sdpa_in_a_model_is_ours_too(model: Any) -> None:
    wanted = logits(model, "sdpa", ids(), attention_mask=MASK)
    with install("sdpa"):
        found = logits(model, "sdpa", ids(), attention_mask=MASK)
    torch.testing.assert_close(found[MASK.bool()], wanted[MASK.bool()], **CLOSE)


def test_transformers_may_be_imported_inside_of_it() -> None:
    """Its checks are satisfied as its modules arrive, and restored."""
    probe = """
from stream_attention.compat import install
with install("flash_attn"):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import is_flash_attn_2_available
    sizes = dict(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(**sizes, attn_implementation="flash_attention_2")
    import torch
    model = LlamaForCausalLM(config)
    print(model(torch.tensor([[1, 2, 3]])).logits.shape, model.config._attn_implementation, is_flash_attn_2_available())
print(is_flash_attn_2_available())
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "torch.Size([1, 3, 8]) flash_attention_2 True\nFalse\n", done.stderr
