"""The memory of weights is what is there after loading, copies for the C kernels included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ragcache_kernels.native.library import supported_tiers
from ragcache_kernels.native.linear import PackedLinear
from small_models import small_model

from ragcache.bench.settings import apart
from ragcache.doctor.model import without_weights
from ragcache.doctor.weights import weight_bytes
from ragcache.engine.fast_layers import FastHead, FastLayer
from ragcache.errors import ConfigError
from ragcache.loading import build_runner

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}  # whole panels
needs_kernels = pytest.mark.skipif(not supported_tiers(), reason="the C kernels were not built")


def packed(model) -> Iterator[PackedLinear]:
    """The copies that a model's layers and head run on."""
    for module in model.modules():
        fast = getattr(module.forward, "__self__", None)
        if isinstance(fast, FastLayer):
            parts = fast._parts()
            yield from (parts.qkv, parts.out, parts.gated, parts.down)
        elif isinstance(fast, FastHead):
            yield fast._linear


def planned(model, backend="native", **options) -> int:
    """What is said of a model, from its configuration."""
    return weight_bytes(without_weights(model.config, model.dtype), backend, apart(**options))


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_it_is_that_of_the_loaded_model(kind, dtype, tied, quantization):
    model = small_model(kind, dtype, tie_word_embeddings=tied, **SIZES)
    said = planned(model, quantization=quantization)
    build_runner(model, apart(device="cpu", quantization=quantization, kv_cache_blocks=4))
    copies = [each.nbytes for each in packed(model)]
    assert len(copies) == 2 * 4 + 1
    left = sum(each.nbytes for each in model.parameters() if not each.is_meta)
    assert said == pytest.approx(left + sum(copies), rel=0.02)


@needs_kernels
def test_int8_is_smaller_and_the_embedding_is_not():
    model = small_model(dtype=torch.float32, tie_word_embeddings=True, **SIZES)
    embedding = model.get_input_embeddings().weight.nbytes
    whole, int8 = planned(model), planned(model, quantization="int8")
    assert int8 - embedding == pytest.approx((whole - embedding) / 4, rel=0.1)


@pytest.mark.parametrize(
    ("backend", "options"), [("torch", {}), ("triton", {}), ("native", {"tensor_parallel_size": 2})]
)
def test_without_copies_it_is_that_of_the_parameters(backend, options):
    model = small_model()
    assert planned(model, backend, **options) == sum(each.nbytes for each in model.parameters())


def test_layers_that_cannot_be_quantised_are_refused_as_serve_refuses_them():
    with pytest.raises(ConfigError, match=r"quantization: .* olmo2, 0 of 2"):
        planned(small_model("olmo2"), quantization="int8")
