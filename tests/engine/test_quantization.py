"""The option `quantization`: where it applies, and that it is clear about where not."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from ragcache_kernels.native import library
from small_models import small_model

from ragcache.config import ServeSettings
from ragcache.engine.model import check_quantization, fingerprint
from ragcache.errors import ConfigError
from ragcache.loading import build_runner

CPU = torch.device("cpu")


def settings() -> ServeSettings:
    return ServeSettings(quantization="int8", kv_cache_blocks=4)


@pytest.mark.skipif(not library.supported_tiers(), reason="the C kernels were not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_of_a_fused_family_is_quantised_and_its_weights_freed(dtype):
    model = small_model(dtype=dtype)
    build_runner(model, settings())
    assert model.lm_head.weight.is_meta
    assert model.get_decoder().layers[1].mlp.down_proj.weight.is_meta


@pytest.mark.skipif(not library.supported_tiers(), reason="the C kernels were not built")
def test_other_models_are_refused():
    with pytest.raises(ConfigError, match=r"quantization: .* olmo2, 0 of 2"):
        build_runner(small_model("olmo2"), settings())
    with pytest.raises(ConfigError, match=r"quantization: .* runs on torch"):
        build_runner(small_model(dtype=torch.float16), settings())


def test_it_is_for_cpus_and_one_rank():
    check_quantization(None, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"quantization: int8 is for CPUs"):
        check_quantization("int8", torch.device("cuda"))
    with pytest.raises(ValidationError, match=r"quantization is for one rank"):
        ServeSettings(quantization="int8", tensor_parallel_size=2)


def test_it_takes_the_c_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    check_quantization(None, CPU)
    with pytest.raises(ConfigError, match=r"quantization: .* no compiler"):
        check_quantization("int8", CPU)


def test_kv_of_quantised_weights_is_never_taken_for_others():
    model = small_model()
    names = {fingerprint(model, torch.float32, name) for name in (None, "int8")}
    assert len(names) == 2
    assert fingerprint(model, torch.float32) in names
