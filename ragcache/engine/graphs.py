"""Decodes recorded once and replayed as CUDA graphs.

Launching the kernels of a small step takes the host longer than running them takes the GPU. Only
the forward pass is recorded: everything that changes from step to step is read from tensors that
stay in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from ragcache_kernels.interface import AttentionBackend, FixedPlan, StepLayout
from torch import Tensor
from torch.nn.functional import pad

from ragcache.engine.batch import StepBatch

log = logging.getLogger(__name__)


# Input ids and positions `[1, T]`, a plan, which rows to keep (0: all) -> logits `[S', V]`.
Forward = Callable[[Tensor, Tensor, Any, Tensor | int], Tensor]
# Runs some work and records it; gives its result, and how to compute that anew in place.
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A forward pass for up to `size` sequences."""

    inputs: Tensor  # [2, 1, size] int64: input ids and positions
    plan: FixedPlan
    logits: Tensor  # [size, V], overwritten by every replay
    replay: Callable[[], None]


class CudaRecorder:
    """Records launches as CUDA graphs, which share the memory of their intermediate results."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Run `work` once, so that its kernels are compiled, then record it."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = work()
        return result, graph.replay


class DecodeGraphs:
    """Forward passes of decodes, one for each of some numbers of sequences.

    Each is recorded when it is first needed. A model whose pass cannot be recorded, because it
    looks at results on the host, runs without; the log tells why.
    """

    def __init__(
        self,
        backend: AttentionBackend[Any],
        device: torch.device,
        *,
        max_sequences: int,
        max_kv_len: int,
        record: Record,
    ) -> None:
        self._backend = backend
        self._device = device
        self._sizes = list(_sizes(max_sequences))
        self._max_kv_len = max_kv_len
        self._record = record
        self._recorded: dict[int, Recorded] = {}

    def run(self, batch: StepBatch, forward: Forward) -> Tensor | None:
        """Logits of a step; None if it is to be run in the ordinary way."""
        layout = self.padded(batch.layout)
        count, size = len(layout.kv_len), len(layout.slot_mapping)
        decodes = batch.input_ids.shape[1] == count == len(batch.last_idx)
        if not decodes or size not in self._sizes:
            return None
        inputs = pad(torch.stack([batch.input_ids, batch.position_ids]), (0, size - count))
        recorded = self._recorded.get(size)
        if recorded is None:
            recorded = self._add(size, inputs, layout, forward)
        elif not recorded.plan.update(layout):
            return None
        if recorded is None:
            return None
        recorded.inputs.copy_(staged(inputs, self._device), non_blocking=True)
        recorded.replay()
        return recorded.logits[:count]

    def padded(self, layout: StepLayout) -> StepLayout:
        """A layout with as many tokens as are recorded for its number of sequences."""
        count = len(layout.slot_mapping)
        size = next((size for size in self._sizes if size >= count), count)
        slots = pad(layout.slot_mapping, (0, size - count), value=-1)
        return replace(layout, slot_mapping=slots)

    def _add(
        self, size: int, inputs: Tensor, layout: StepLayout, forward: Forward
    ) -> Recorded | None:
        plan = self._backend.fixed_plan(size, self._max_kv_len, layout.block_size, self._device)
        if plan is None or not plan.update(layout):
            return None
        held = inputs.to(self._device)
        log.info("recording the decode step of %d sequences", size)
        try:
            logits, replay = self._record(lambda: forward(held[0], held[1], plan, 0))
        except RuntimeError as error:
            log.warning("decode steps run without CUDA graphs: %s", error)
            self._sizes.clear()
            return None
        self._recorded[size] = Recorded(held, plan, logits, replay)
        return self._recorded[size]


def staged(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor from where `device` can fetch it without the host's waiting."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _sizes(largest: int) -> Iterator[int]:
    """1, 2, 4, 8, then multiples of 8, the last of them at least `largest`."""
    yield from (size for size in (1, 2, 4) if size < largest)
    yield from range(8, largest + 8, 8)
