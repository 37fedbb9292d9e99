"""The dtype of cached keys and values: what a block takes, and what keeps it apart from others."""

from __future__ import annotations

import pytest
import torch
from small_models import small_model

from ragcache.config import ServeSettings
from ragcache.engine.model import check_kv_dtype, fingerprint
from ragcache.engine.pool import KVPool, LayerShape
from ragcache.errors import ConfigError
from ragcache.loading import build_runner

LAYERS = [LayerShape(2, 64, 64), LayerShape(1, 64, 32)]


@pytest.mark.parametrize(
    ("dtype", "block_bytes"),
    [
        (torch.float32, 16 * (2 * 128 + 96) * 4),
        (torch.bfloat16, 16 * (2 * 128 + 96) * 2),
        (torch.int8, 16 * (2 * (128 + 8) + 96 + 8)),  # two scales for a head
        (torch.float8_e4m3fn, 16 * (2 * (128 + 8) + 96 + 8)),
    ],
    ids=str,
)
def test_a_block_takes_what_its_dtype_takes(dtype, block_bytes):
    assert KVPool(LAYERS, 3, 16, dtype, torch.device("cpu")).block_bytes == block_bytes


def test_the_option_decides_how_many_blocks_fit():
    blocks = {}
    for name in ("auto", "int8", "fp8"):
        settings = ServeSettings(kv_cache_dtype=name, kv_cache_memory=10**6, max_model_len=64)
        runner, blocks[name] = build_runner(small_model(), settings)
        assert (runner.kv_dtype is torch.float32) is (name == "auto")
    row = 8  # elements, of which each takes 4 bytes or 1, and a scale 4
    block = 16 * 2 * 2 * 2
    assert blocks == {
        "auto": 10**6 // (block * 4 * row),
        "int8": 10**6 // (block * (row + 4)),
        "fp8": 10**6 // (block * (row + 4)),
    }


def test_kv_of_one_dtype_is_never_taken_for_anothers():
    model = small_model()
    dtypes = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
    assert len({fingerprint(model, dtype) for dtype in dtypes}) == len(dtypes)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
def test_fp8_on_a_gpu_without_it_is_one_clear_error(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: fp8 .* 8\.9 .* int8"):
        check_kv_dtype("fp8", torch.device("cuda"))
    check_kv_dtype("int8", torch.device("cuda"))


@pytest.mark.parametrize(
    ("device", "capability"), [("cpu", (0, 0)), ("cuda", (8, 9)), ("cuda", (9, 0))]
)
def test_fp8_elsewhere_is_not_refused(device, capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    check_kv_dtype("fp8", torch.device(device))
