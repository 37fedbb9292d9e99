"""A model ready to run: paged attention, fused layers, pool, recorded decode steps, host tier."""

from __future__ import annotations

import logging
from typing import Any

from ragcache_kernels import AttentionBackend, best_backend, get_backend
from ragcache_kernels.native.backend import NativeBackend
from transformers import PreTrainedModel

from ragcache.config import ServeSettings
from ragcache.engine.batch import StepBatch
from ragcache.engine.fast_model import use_fast_layers
from ragcache.engine.graphs import CudaRecorder, DecodeGraphs, Limits
from ragcache.engine.host_pool import host_pool
from ragcache.engine.model import check_quantized, choose_kv_dtype
from ragcache.engine.parallel import smallest
from ragcache.engine.pool import STAGING, KVPool, LayerShape, pool_blocks
from ragcache.engine.profile import largest_step, step_memory
from ragcache.engine.runner import ModelRunner
from ragcache.engine.support import prepare_model
from ragcache.errors import ConfigError

log = logging.getLogger(__name__)


def build_runner(model: PreTrainedModel, settings: ServeSettings) -> tuple[ModelRunner, int]:
    """Switch a model to paged attention and give it a KV pool; also returns its blocks.

    Raises ConfigError naming the option that cannot be honoured.
    """
    return _Assembly(model, settings).runner()


def max_model_len(model: PreTrainedModel, settings: ServeSettings) -> int:
    """Tokens of one request; raises ConfigError where the model does not tell or allow it."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    wanted = settings.max_model_len or limit
    if wanted is None:
        raise ConfigError("max_model_len: the model's configuration does not tell; please set it")
    if limit is not None and wanted > limit:
        raise ConfigError(f"max_model_len: {wanted} exceeds the model's {limit} positions")
    return wanted


class _Assembly:
    """The parts of a runner, in the order in which they need each other."""

    def __init__(self, model: PreTrainedModel, settings: ServeSettings) -> None:
        self._model = model
        self._settings = settings
        self._ranks = settings.tensor_parallel_size
        self._kv_dtype = choose_kv_dtype(settings.kv_cache_dtype, model.dtype)
        self._layers = prepare_model(model)
        self._backend = self._choose_backend(self._layers)
        self._use_fast_layers()
        self._max_len = max_model_len(model, settings)

    def runner(self) -> tuple[ModelRunner, int]:
        """The runner, warmed up where that is worth it, and the blocks of its pool."""
        settings = self._settings
        num_blocks = settings.kv_cache_blocks or self._fitting_blocks()
        if self._ranks > 1:
            num_blocks = smallest(num_blocks, self._model.device)
        pool = self._pool(num_blocks)
        host = None
        if settings.host_cache_memory is not None:
            host = host_pool(pool.tensors, settings.host_cache_memory // self._ranks)
        graphs = self._graphs(num_blocks)
        runner = ModelRunner(self._model, pool, self._backend, graphs, host)
        if self._compiles:
            runner.warm_up(self._largest_step())
        return runner, num_blocks

    @property
    def _compiles(self) -> bool:
        """Whether the first step of a kind takes long."""
        return self._backend.name == "triton"

    def _choose_backend(self, layers: list[LayerShape]) -> AttentionBackend[Any]:
        dims = (max(layer.key_dim, layer.value_dim) for layer in layers)
        name = best_backend(self._model.device, self._model.dtype, dims)
        log.info("attention runs on %s", name)
        quantised = self._settings.quantization is not None and name == "native"
        return NativeBackend(quantised=True) if quantised else get_backend(name)

    def _use_fast_layers(self) -> None:
        fused = use_fast_layers(self._model, self._backend, keep_plain=False)
        check_quantized(self._settings.quantization, self._model, self._backend.name, fused)

    def _pool(self, num_blocks: int) -> KVPool:
        size, device = self._settings.block_size, self._model.device
        try:
            return KVPool(self._layers, num_blocks, size, self._kv_dtype, device)
        except RuntimeError as error:
            message = f"the KV pool of {num_blocks} blocks cannot be had: {error}"
            raise ConfigError(message) from error

    def _fitting_blocks(self) -> int:
        one_block, memory = self._pool(1), self._settings.kv_cache_memory
        device, reserved = self._model.device, 0
        if device.type == "cuda" and memory is None:
            most = pool_blocks(one_block.block_bytes, None, device, self._ranks)
            runner = ModelRunner(self._model, one_block, self._backend, self._graphs(most))
            step, running = self._largest_step(), self._settings.max_running
            reserved = step_memory(runner, step, running, device)
            log.info("the largest steps take %d MiB", reserved >> 20)
            reserved += STAGING if self._settings.host_cache_memory is not None else 0
        return pool_blocks(one_block.block_bytes, memory, device, self._ranks, reserved)

    def _graphs(self, num_blocks: int) -> DecodeGraphs | None:
        """None where steps are not to be recorded; among ranks, graphs are untried."""
        if not (self._compiles and self._settings.cuda_graphs and self._ranks == 1):
            return None
        size = self._settings.block_size
        tokens = num_blocks * size
        limits = Limits(self._settings.max_running, min(self._max_len, tokens), tokens, size)
        return DecodeGraphs(self._backend, self._model.device, limits, CudaRecorder())

    def _largest_step(self) -> StepBatch:
        settings = self._settings
        return largest_step(
            settings.max_batch_tokens, settings.max_running, self._max_len, settings.block_size
        )
