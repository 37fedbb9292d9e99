"""One step on one model: move blocks, write KV, attend, project to logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from ragcache_kernels import apply_masks, upload
from ragcache_kernels.interface import AttentionBackend, LayerCache, StepLayout
from torch import Tensor, nn
from transformers import PreTrainedModel

from ragcache.engine.attention import (
    AttentionCall,
    LayerContext,
    LayersCall,
    PackedCall,
    forward_context,
)
from ragcache.engine.batch import StepBatch
from ragcache.engine.fast_model import runs_as_fast_decoder
from ragcache.engine.graphs import DecodeGraphs
from ragcache.engine.host_pool import HostPool
from ragcache.engine.pool import KVPool


def nothing() -> None:
    """What is done meanwhile, by default."""


class Runner(Protocol):
    """Whatever turns a step's batch into logits.

    It is `exact` if the bits of a row are the same however many rows are computed at once, so that
    a token sampled behind a draft is the one that would have been sampled without.
    """

    @property
    def exact(self) -> bool:
        """See above."""

    def run(self, batch: StepBatch, meanwhile: Callable[[], None] = nothing) -> Tensor:
        """Logits `[S', V]` of the rows in `batch.last_idx`.

        `meanwhile` is called once, as late as it can be with the step and its swaps still to come.
        """

    def prepare(self, layout: StepLayout) -> None:
        """Plan a step that may come next; called while a GPU still runs the last one."""

    def close(self) -> None:
        """Give back what lives beyond this object; called once, after the last step."""


class ModelRunner:
    """Runs steps of a prepared model (see `support.prepare_model`) over its pool.

    `host` is where its blocks can be swapped to, if anywhere.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: KVPool,
        backend: AttentionBackend[Any],
        graphs: DecodeGraphs | None = None,
        host: HostPool | None = None,
    ) -> None:
        self._model = model
        self.pool = pool
        self._backend = backend
        self._graphs = graphs
        self.host = host
        self._device = model.device

    @property
    def exact(self) -> bool:
        """See `Runner`; the C kernels are."""
        return self._backend.name == "native" and runs_as_fast_decoder(self._model)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the keys and values in the pool."""
        return self.pool.dtype

    @torch.inference_mode()
    def run(self, batch: StepBatch, meanwhile: Callable[[], None] = nothing) -> Tensor:
        """Logits `[S', V]` of the rows in `batch.last_idx`; KV of all rows is written."""
        if self.host is not None and (batch.swap_outs or batch.swap_ins):
            meanwhile()  # on a CPU, swaps may take as long as the rest
            meanwhile = nothing
            self.host.swap_out(batch.swap_outs)
            self.host.swap_in(batch.swap_ins)
        if batch.copies:
            self._backend.copy_blocks(self.pool.tensors, batch.copies)
        if self._graphs is not None:
            logits = self._graphs.run(batch)
            if logits is not None:
                meanwhile()
                return logits
        plan = self._backend.plan(batch.layout, self._device)
        inputs = (batch.input_ids, batch.position_ids, batch.last_idx)
        input_ids, position_ids, last_idx = (
            upload(tensor.numpy(), self._device) for tensor in inputs
        )
        return self._forward(input_ids, position_ids, plan, last_idx, meanwhile)

    @torch.inference_mode()
    def warm_up(self, largest: StepBatch) -> None:
        """Compile and record before the first request what would otherwise hold one up.

        `largest` reads block 0 alone and writes nowhere, see `profile.largest_step`.
        """
        logits = self.run(largest)[:1].float()
        apply_masks(logits, [0], np.full((1, -(-logits.shape[1] // 32)), -1, dtype=np.int32))
        self._backend.copy_blocks(self.pool.tensors, [(0, 0)])  # swaps take the same kernels
        if self._graphs is not None:
            self._graphs.record_all(self._forward)

    @torch.inference_mode()
    def rehearse(self, largest: StepBatch) -> Tensor:
        """Run the steps that take the most memory; returns logits of `largest`."""
        logits = self.run(largest)
        if self._graphs is not None:
            self._graphs.rehearse(self._forward)
        return logits

    def prepare(self, layout: StepLayout) -> None:
        """See `Runner`."""
        padded = layout if self._graphs is None else self._graphs.padded(layout)
        self._backend.prepare(padded)

    def _forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        plan: Any,
        keep: Tensor | int,
        meanwhile: Callable[[], None] = nothing,
    ) -> Tensor:
        with forward_context(_Step(self.pool, self._backend, plan, meanwhile)):
            output = self._model(
                input_ids=input_ids,
                position_ids=position_ids,
                use_cache=False,
                logits_to_keep=keep,
            )
        return output.logits[0]  # type: ignore[no-any-return]

    def drop_host(self) -> None:
        """Give up the host tier, and its memory."""
        if self.host is not None:
            self.host.close()
            self.host = None

    def close(self) -> None:
        """See `Runner`."""
        self.drop_host()


class _Step(LayerContext):
    """The forward context of one step; `meanwhile` is called when all of it, or most, is left."""

    def __init__(
        self,
        pool: KVPool,
        backend: AttentionBackend[Any],
        plan: object,
        meanwhile: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._backend = backend
        self._plan = plan
        self._meanwhile = meanwhile
        self.ops = backend.ops

    def attend(self, call: AttentionCall) -> Tensor:
        cache = self._cache(call.module)
        self._begin()
        self._backend.write_kv(call.key, call.value, cache, self._plan)
        return self._backend.attend(call.query, cache, self._plan, call.spec)

    def attend_packed(self, call: PackedCall) -> Tensor:
        cache = self._cache(call.module)
        self._begin()
        query = self._backend.rotate_and_write(call.qkv, call.rotation, cache, self._plan)
        return self._backend.attend(query, cache, self._plan, call.spec)

    def run_layers(self, call: LayersCall) -> Tensor:
        caches = [self._cache(module) for module in call.modules]
        self._begin()
        inputs = call.layers, call.hidden, call.angles, caches, self._plan
        return self._backend.run_layers(*inputs, call.keep)

    def _begin(self) -> None:
        self._meanwhile()
        self._meanwhile = nothing

    def _cache(self, attention: nn.Module) -> LayerCache:
        return self._pool.layers[attention.layer_idx]  # type: ignore[index]
