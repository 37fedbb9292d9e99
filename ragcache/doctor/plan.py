"""What `serve` would run with its settings, found by the functions that it uses itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ragcache_kernels import PREFERENCE, best_backend, objection
from transformers import PreTrainedModel

from ragcache.config import ServeSettings
from ragcache.doctor.model import FoundModel, locate, read_config, without_weights
from ragcache.doctor.weights import weight_bytes
from ragcache.engine.assembly import max_model_len
from ragcache.engine.fast_model import may_run_as_fast_decoder
from ragcache.engine.machine import free_memory
from ragcache.engine.model import (
    check_kv_dtype,
    check_quantization,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
)
from ragcache.engine.parallel import check_devices, check_split
from ragcache.engine.pool import FREE_MEMORY_SHARE, KVPool, LayerShape, pool_blocks
from ragcache.engine.support import prepare_model
from ragcache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    """`others` has the attention backends that are not taken, each with the reason.

    Weights are in bytes, as they are kept once loaded. The KV pool is in tokens, before what steps
    take of a GPU's memory. At most `max_draft` tokens are tried ahead for a request.
    """

    model: FoundModel
    device: str
    dtype: str
    dtype_reason: str
    auto_dtype: str
    backend: str
    others: dict[str, str]
    quantization: str | None
    weights: int
    kv_dtype: str
    kv_tokens: int
    max_model_len: int
    max_draft: int
    draft_reason: str


def make_plan(settings: ServeSettings) -> Plan:
    """Everything but loading the weights; raises ConfigError where `serve` would."""
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    check_kv_dtype(settings.kv_cache_dtype, device)
    check_quantization(settings.quantization, device)
    found = locate(settings.model)
    config = read_config(found)
    if (ranks := settings.tensor_parallel_size) > 1:
        check_devices(device, ranks)
        check_split(config, ranks)
    model = without_weights(config, dtype)
    layers = prepare_model(model)
    backend, others = _backends(device, dtype, layers)
    weights = weight_bytes(model, backend, settings)
    kv_dtype = choose_kv_dtype(settings.kv_cache_dtype, dtype)
    max_draft, draft_reason = _drafts(settings, model, backend)
    return Plan(
        model=found,
        device=device.type,
        dtype=name_of(dtype),
        dtype_reason=_dtype_reason(settings.dtype, dtype, device),
        auto_dtype=name_of(choose_dtype("auto", device)),
        backend=backend,
        others=others,
        quantization=settings.quantization,
        weights=weights,
        kv_dtype=name_of(kv_dtype),
        kv_tokens=_pool_tokens(settings, layers, kv_dtype, weights, device),
        max_model_len=max_model_len(model, settings),
        max_draft=max_draft,
        draft_reason=draft_reason,
    )


def name_of(dtype: torch.dtype) -> str:
    """As options write it."""
    return str(dtype).removeprefix("torch.")


def _dtype_reason(asked: str, dtype: torch.dtype, device: torch.device) -> str:
    if asked != "auto":
        return "asked for"
    where = "this GPU" if device.type == "cuda" else "this processor"
    fast = "has" if dtype == torch.bfloat16 else "has no"
    return f"{where} {fast} instructions for products in bfloat16"


def _backends(
    device: torch.device, dtype: torch.dtype, layers: list[LayerShape]
) -> tuple[str, dict[str, str]]:
    """The backend that is taken, and why the others are not."""
    dims = [max(layer.key_dim, layer.value_dim) for layer in layers]
    taken = best_backend(device, dtype, dims)
    others = {
        name: objection(name, device, dtype, dims) or f"{taken} is faster"
        for name in PREFERENCE
        if name != taken
    }
    return taken, others


def _drafts(settings: ServeSettings, model: PreTrainedModel, backend: str) -> tuple[int, str]:
    """How many tokens are tried ahead, and why."""
    if not settings.speculative_tokens:
        return 0, "asked for"
    if backend != "native":
        return 0, f"in {backend} a token may depend on what it is computed with"
    if settings.tensor_parallel_size > 1:
        return 0, "not tested with several ranks"
    if not may_run_as_fast_decoder(model):
        return 0, f"of a {model.config.model_type} model torch computes a part"
    return settings.speculative_tokens, "in C they change no answer"


def _pool_tokens(
    settings: ServeSettings,
    layers: list[LayerShape],
    kv_dtype: torch.dtype,
    weights: int,
    device: torch.device,
) -> int:
    """Raises ConfigError where the weights leave no room for a block."""
    size, ranks, on_cpu = settings.block_size, settings.tensor_parallel_size, device.type == "cpu"
    if settings.kv_cache_blocks is not None:
        return settings.kv_cache_blocks * size
    own = weights // (1 if on_cpu else ranks)  # the ranks of a CPU share its memory
    left = free_memory(device) - own
    if left <= 0:
        raise ConfigError(f"model: its weights take {own >> 20} MiB, {(left + own) >> 20} are free")
    share = FREE_MEMORY_SHARE[device.type] / (ranks if on_cpu else 1)
    memory = settings.kv_cache_memory or int(left * share)
    block = KVPool(layers, 1, size, kv_dtype, torch.device("meta"))
    return pool_blocks(block.block_bytes // ranks, memory, device) * size
