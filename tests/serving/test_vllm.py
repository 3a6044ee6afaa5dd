"""The backend for vLLM, driven as the engine drives it: caches in each of its layouts, steps of prompts and tokens."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_stand_in
from torch import Tensor

from stream_attention import UnsupportedProblem
from stream_attention.serving import vllm_plugin
from stream_attention_tools.testing.tolerance import FORWARD_FACTOR

LAYOUTS = {
    # physical order of layers, blocks, heads, tokens and channels -> strides of a layer's [P, Hkv, page, 2 * D] in
    # elements, for 2 layers, 2 heads, pages of 16 and D 64
    "LBHNC": (4096, 2048, 128, 1),
    "LBNHC": (4096, 128, 256, 1),
    "LHBNC": (2048, 131072, 128, 1),
    "BLHNC": (8192, 2048, 128, 1),
    "BLNHC": (8192, 128, 256, 1),
    "BHLNC": (8192, 4096, 128, 1),
}
E4M3 = torch.float8_e4m3fn


def empty_cache(layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype, layers: int = 2) -> Tensor:
    """The cache `[P, Hkv, page, 2 * D]` of the last layer of some that share one allocation."""
    sizes = dict(zip("LBHNC", (layers, *shape), strict=True))
    flat = torch.empty([sizes[name] for name in layout], dtype=dtype)
    flat.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
    return flat.permute([layout.index(name) for name in "LBHNC"])[-1]


@dataclass
class Layer:
    """What vLLM's attention layer has that an implementation reads."""

    _k_scale: Tensor
    _v_scale: Tensor


@dataclass(frozen=True)
class Case:
    layout: str = "LBNHC"
    dtype: torch.dtype = torch.float32
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    page: int = 16
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    causal: Any = True  # True, False or whether each request is
    scales: tuple[Any, Any] | None = None  # of pages in e4m3
    steps: tuple[tuple[int, ...], ...] = ((37, 0, 0), (20, 5, 0), (1, 18, 33), (1, 1, 1), (1, 4, 0))
    """New tokens of each request, by step: chunks of prompts, with other requests' single tokens."""
    seed: int = 0


def by_hand(case: Case, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, causal: bool) -> Tensor:
    """Attention of the newest queries `[q, Hq, D]` of a request over its keys `[s, Hkv, D]`, in their dtype."""
    q_len, k_len = len(query), len(key)
    key, value = (t.repeat_interleave(case.heads // case.kv_heads, 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * case.dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    distance = torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)
    if case.slopes is not None:
        scores = scores - torch.tensor(case.slopes, dtype=scores.dtype)[:, None, None] * distance.abs()
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if case.window is not None:
        visible &= distance.abs() < case.window
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, q_len, 1)], -1)
    weights = scores.softmax(-1)[..., :k_len]
    return torch.einsum("hqk,khd->qhd", weights, value)


def run(serving: ModuleType, case: Case, batch_invariant: bool = False) -> None:
    """Run the steps of a case, and compare every row with fp64."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    requests, page = len(case.steps[0]), case.page
    lengths = [sum(step[b] for step in case.steps) for b in range(requests)]
    needed = [-(-length // page) for length in lengths]
    pages = sum(needed) + 1
    free = (torch.randperm(pages - 1, generator=generator) + 1).tolist()  # page 0 is nobody's
    table = torch.zeros(requests, max(needed) + 2, dtype=torch.int32)
    for b, count in enumerate(needed):
        table[b, :count] = torch.tensor([free.pop() for _ in range(count)])
    stored = torch.uint8 if case.scales else case.dtype
    cache = empty_cache(case.layout, (pages, case.kv_heads, page, 2 * case.dim), stored)
    scales = [torch.as_tensor(scale, dtype=torch.float32) for scale in case.scales or (1.0, 1.0)]
    layer = Layer(*scales)
    sinks = normal(case.heads) if case.sinks else None
    impl = serving.StreamAttentionImpl(
        case.heads, case.dim, case.dim**-0.5, case.kv_heads, None if case.slopes is None else list(case.slopes),
        case.window, "fp8" if case.scales else "auto", case.softcap, "decoder", None,
        **({} if sinks is None else {"sinks": sinks}),
    )  # fmt: skip
    impl.batch_invariant = batch_invariant
    spec = SimpleNamespace(block_size=page)
    builder = serving.StreamAttentionMetadataBuilder(spec, ["layer"], None, torch.device("cpu"))
    common_of = import_module("vllm.v1.attention.backend").CommonAttentionMetadata

    queries, keys, values = (
        [normal(length, heads, case.dim) for length in lengths] for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    done = [0] * requests
    for step in case.steps:
        new = [slice(first, first + count) for first, count in zip(done, step, strict=True)]
        done = [one.stop for one in new]
        offsets = torch.tensor([0, *step]).cumsum(0).int()
        rows, padding = sum(step), 3
        slots = torch.cat([table[b, (at := torch.arange(s.start, s.stop)) // page] * page + at % page
                           for b, s in enumerate(new)])  # fmt: skip
        slots = torch.cat([slots.long(), torch.full((padding,), -1)])
        causal = case.causal if isinstance(case.causal, bool) else torch.tensor(case.causal, dtype=torch.int32)
        common = common_of(
            query_start_loc=offsets, query_start_loc_cpu=offsets, seq_lens=torch.tensor(done, dtype=torch.int32),
            num_reqs=requests, num_actual_tokens=rows, max_query_len=max(step), max_seq_len=max(done),
            block_table_tensor=table, slot_mapping=slots, causal=causal,
        )  # fmt: skip
        metadata = builder.build(0, common)
        query, key, value = (
            torch.cat([t[b][s] for b, s in enumerate(new)] + [torch.full_like(t[0][:1], math.nan)] * padding)
            for t in (queries, keys, values)
        )
        impl.do_kv_cache_update(layer, key, value, cache, slots)
        out = torch.full_like(query, 7.0)
        assert impl.forward(layer, query, key, value, cache, metadata, out) is out
        assert (out[rows:] == 7).all(), "rows of padding were written to"
        for b, (first, last) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
            if first == last:
                continue
            its = [t[b][: done[b]] for t in (keys, values)]
            if case.scales:
                its = [(t / s[..., None]).to(E4M3).float() * s[..., None] for t, s in zip(its, scales, strict=True)]
            one = bool(case.causal) if isinstance(case.causal, bool) else bool(case.causal[b])
            exact, rounded = (
                by_hand(case, query[first:last].to(dtype), *(t.to(dtype) for t in its), sinks, one).double()
                for dtype in (torch.float64, case.dtype)
            )
            error = (out[first:last].double() - exact).abs().max()
            noise = 4 * torch.finfo(case.dtype).eps * exact.abs().max()
            allowed = FORWARD_FACTOR * (rounded - exact).abs().max() + noise
            assert error <= allowed, f"request {b}: error {error:.2e}, allowed {allowed:.2e}"


# The cache, and steps


@pytest.mark.parametrize(("layout", "strides"), LAYOUTS.items())
def test_the_layouts_are_those_of_vllm(layout: str, strides: tuple[int, ...]) -> None:
    assert empty_cache(layout, (64, 2, 16, 128), torch.bfloat16).stride() == strides


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_steps_of_prompts_and_tokens_in_every_layout(serving: ModuleType, layout: str, dtype: torch.dtype) -> None:
    run(serving, Case(layout, dtype))


FEATURES = {
    "grouped heads": Case(heads=8, kv_heads=1),
    "one head each": Case(heads=2, kv_heads=2),
    "pages of 48": Case(page=48),
    "window of 1": Case(window=1),
    "window over pages": Case(window=21),
    "sinks": Case(sinks=True),
    "sinks and window": Case(sinks=True, window=16, layout="LBHNC"),
    "softcap": Case(softcap=2.0),
    "ALiBi": Case(slopes=(0.5, 0.25, 0.125, 0.0625)),
    "not causal": Case(causal=False, steps=((12, 3, 0), (5, 0, 9))),
    "not causal, window": Case(causal=False, window=6, steps=((12, 3, 0), (5, 0, 9))),
    "causal by request": Case(causal=(1, 0, 1), window=9, steps=((12, 3, 2), (5, 1, 9))),
    "e4m3": Case(scales=(0.02, 0.025)),
    "e4m3 in bfloat16, a scale for each head": Case(dtype=torch.bfloat16, scales=((0.02, 0.03), (0.025, 0.01))),
    "e4m3, window, sinks": Case(scales=(1.0, 1.0), window=20, sinks=True, layout="BHLNC"),
}


@pytest.mark.parametrize("case", FEATURES.values(), ids=FEATURES)
def test_what_layers_may_have(serving: ModuleType, case: Case) -> None:
    run(serving, case)


def test_batch_invariant_steps(serving: ModuleType) -> None:
    run(serving, Case(), batch_invariant=True)


def test_a_wrong_window_would_be_noticed(serving: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control of this file: the same comparison fails where the implementation is told another window."""
    own = serving.StreamAttentionImpl.__init__

    def wider(self: Any, *options: Any, **more: Any) -> None:
        own(self, *options, **more)
        self.window = (self.window[0] + 1, 0)

    monkeypatch.setattr(serving.StreamAttentionImpl, "__init__", wider)
    with pytest.raises(AssertionError, match="error"):
        run(serving, Case(window=7))


# The engine's other calls


def layer_of(serving: ModuleType, **options: Any) -> Any:
    return serving.StreamAttentionImpl(4, 32, 32**-0.5, 2, **options)


def test_the_run_that_measures_memory_has_no_metadata(serving: ModuleType) -> None:
    out = torch.full((3, 4, 32), 7.0)
    found = layer_of(serving).forward(Layer(*torch.ones(2)), out, None, None, torch.tensor([]), None, out)
    assert found is out and not out.any()


def test_a_layer_that_shares_a_cache_has_no_keys(serving: ModuleType) -> None:
    torch.manual_seed(0)
    cache, layer = empty_cache("LBNHC", (3, 2, 16, 64), torch.float32), Layer(*torch.ones(2))
    key, value = torch.randn(2, 5, 2, 32)
    layer_of(serving).do_kv_cache_update(layer, key, value, cache, torch.arange(16, 21))
    offsets, lengths = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    step = serving.Step(offsets, lengths, torch.tensor([[1]], dtype=torch.int32), torch.arange(16, 21), 5, True)
    query, out = torch.randn(5, 4, 32), torch.empty(5, 4, 32)
    layer_of(serving, kv_sharing_target_layer_name="other").forward(layer, query, None, None, cache, step, out)
    torch.testing.assert_close(out, by_hand(Case(), query, key, value, None, True))


def test_the_work_of_a_step_is_listed_once_for_layers_of_a_kind(serving: ModuleType) -> None:
    step = serving.Step(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([9], dtype=torch.int32),
        torch.tensor([[1]], dtype=torch.int32),
        torch.tensor([24]),
        1,
        True,
    )
    query, pages = torch.randn(1, 4, 32), torch.randn(2, 16, 2, 32)
    options = {"page_table": step.block_table, "max_seqlen_q": 1, "batch_invariant": False}
    first = step.plan(query, pages, pages, window=None, **options)
    assert step.plan(query.clone(), pages.clone(), pages, window=None, **options) is first
    assert step.plan(query, pages, pages, window=(4, 4), **options) is not first


def test_another_group_of_layers_has_other_pages_and_its_own_plans(serving: ModuleType) -> None:
    builder = serving.StreamAttentionMetadataBuilder(None, [], None, torch.device("cpu"))
    integers = torch.zeros(2, dtype=torch.int32)
    step = serving.Step(integers, integers[:1], integers[None], integers, 1, True, {"kind": None})
    other = builder.update_block_table(step, integers[None] + 1, integers + 2)
    assert other.block_table.eq(1).all() and other.slot_mapping.eq(2).all() and not other.plans
    assert other.query_start_loc is step.query_start_loc and other.seq_lens is step.seq_lens


def test_what_is_said_of_graphs(serving: ModuleType) -> None:
    assert serving.StreamAttentionMetadataBuilder._cudagraph_support.name == "UNIFORM_BATCH"


# Refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_type": "encoder_only"}, "supports decoder attention only; got .*encoder_only"),
        ({"attn_type": "encoder_decoder"}, "supports decoder attention only; got .*encoder_decoder"),
        ({"chunk_lookback": 2}, "does not support chunk_lookback, which this model uses.*TRITON_ATTN"),
        ({"use_alibi_sqrt": True}, "does not support use_alibi_sqrt"),
        ({"sinks": torch.zeros(3)}, r"sinks: expected shape \[Hq=4\]; got \[3\]"),
    ],
)
def test_a_layer_that_we_cannot_compute_is_refused_when_it_is_made(
    serving: ModuleType, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        layer_of(serving, **options)


def test_arguments_that_ask_for_nothing_are_taken(serving: ModuleType) -> None:
    assert layer_of(serving, chunk_lookback=-1, use_alibi_sqrt=False, sinks=None).sinks is None


def test_a_quantised_output_is_refused(serving: ModuleType) -> None:
    out = torch.empty(1, 4, 32)
    with pytest.raises(UnsupportedProblem, match="does not quantise its output"):
        layer_of(serving).forward(Layer(*torch.ones(2)), out, None, None, out, None, out, torch.ones(1))


def reasons(serving: ModuleType, monkeypatch: pytest.MonkeyPatch, device: str = "cpu", **given: Any) -> str | None:
    arch = given.pop("arch", None)
    capability = None if arch is None else SimpleNamespace(to_int=lambda: arch)
    platform = SimpleNamespace(device_type=device, device_name=device, is_cuda=lambda: device == "cuda")
    monkeypatch.setattr(serving, "current_platform", platform)
    asked = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
    asked |= dict.fromkeys(("use_mla", "has_sink", "use_sparse", "use_mm_prefix"), False)
    return serving.StreamAttentionBackend.supports_combination(**asked | given, device_capability=capability)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_cache_dtype": "float16"}, "pages in the dtype of queries, bfloat16, or in float8_e4m3fn; got float16"),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "supports kv_cache_dtype auto, float16, bfloat16, fp8, fp8_e4m3; got fp8_e5m2",
        ),
        ({"device": "cuda", "arch": 90, "head_size": 512}, "supports head dims up to 256; got D=512"),
        ({"device": "cuda", "arch": 75}, "requires compute capability 8.0 or newer; got 7.5"),
        ({"device": "cuda", "arch": 80, "kv_cache_dtype": "fp8"}, "pages in e4m3 requires compute capability 8.9"),
        ({"device": "cuda", "arch": 75, "head_size": 320}, "7.5; supports head dims up to 256"),
        ({"device": "xpu"}, "supports NVIDIA GPUs and CPUs; got xpu"),
    ],
)
def test_a_model_that_we_cannot_serve_is_declined_with_the_reason(
    serving: ModuleType, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], words: str
) -> None:
    if given.get("device") == "cuda":
        pytest.importorskip("triton")
    assert words in str(reasons(serving, monkeypatch, **given))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dtype": torch.float32},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": None, "has_sink": True},
        {"device": "cuda", "arch": 90, "kv_cache_dtype": "fp8_e4m3", "has_sink": True},
        {"device": "cuda", "arch": 80, "head_size": 256, "kv_cache_dtype": "bfloat16", "block_size": 48},
    ],
)
def test_a_model_that_we_can_serve_is_not(
    serving: ModuleType, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    if given.get("device") == "cuda":
        pytest.importorskip("triton")
    assert reasons(serving, monkeypatch, **given) is None


def test_pages_larger_than_ours_are_split(serving: ModuleType) -> None:
    sizes = serving.StreamAttentionBackend.get_supported_kernel_block_sizes
    assert [one.base for one in sizes()] == [one.base for one in sizes(SimpleNamespace(block_size=1024))] == [16]
    assert sizes(SimpleNamespace(block_size=1040)) == [16, 32, 64, 128, 256, 512, 1024]


# Registration


def test_the_plugin_registers_a_name_once() -> None:
    with pytest.MonkeyPatch.context() as patch:
        made = vllm_stand_in.modules()
        for name, module in made.items():
            patch.setitem(sys.modules, name, module)
        vllm_plugin.register()
        vllm_plugin.register()
        members = made["vllm.v1.attention.backends.registry"].AttentionBackendEnum.__members__
        assert members == {"CPU_ATTN": "its own", "STREAM_ATTENTION": vllm_plugin.BACKEND}


def test_the_registered_name_is_the_backend(serving: ModuleType) -> None:
    module, _, name = vllm_plugin.BACKEND.rpartition(".")
    backend = getattr(import_module(module), name)
    assert backend is serving.StreamAttentionBackend and backend.get_name() == vllm_plugin.NAME
    assert backend.get_impl_cls() is serving.StreamAttentionImpl
    assert backend.get_builder_cls() is serving.StreamAttentionMetadataBuilder


def test_registration_imports_neither_the_backend_nor_vllm_itself() -> None:
    probe = (
        "import sys; from stream_attention.serving import vllm_plugin; "
        "print([name for name in sys.modules if name.split('.')[0] == 'vllm' or name.endswith('serving.vllm')])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_the_entry_point_is_what_pyproject_says() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]' in text
    assert f'stream_attention = "{vllm_plugin.__name__}:{vllm_plugin.register.__name__}"' in text


# Versions


def test_a_release_that_was_not_run_warns(serving: ModuleType, recwarn: pytest.WarningsRecorder) -> None:
    serving._warn_if_not_run("0.32.0+cpu")
    assert not recwarn.list
    with pytest.warns(RuntimeWarning, match=r"run with vLLM 0\.32; this is 0\.33\.1"):
        serving._warn_if_not_run("0.33.1")
