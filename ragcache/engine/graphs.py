"""Decodes recorded once and replayed as CUDA graphs.

Launching the kernels of a small step takes the host longer than running them takes the GPU. Only
the forward pass is recorded: everything that changes from step to step is read from tensors that
stay in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from ragcache_kernels import upload
from ragcache_kernels.interface import AttentionBackend, FixedPlan, StepLayout
from torch import Tensor
from torch.nn.functional import pad

from ragcache.engine.batch import StepBatch

log = logging.getLogger(__name__)


# Input ids and positions `[1, T]`, a plan, which rows to keep (0: all) -> logits `[S', V]`.
Forward = Callable[[Tensor, Tensor, Any, Tensor | int], Tensor]
# Records some work; gives how to do it again.
Record = Callable[[Callable[[], None]], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A forward pass for up to `size` sequences."""

    inputs: Tensor  # [2, 1, size] int64: input ids and positions
    plan: FixedPlan
    replay: Callable[[], None]


class CudaRecorder:
    """Records launches as CUDA graphs, which share the memory of their intermediate results."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work`, whose kernels are compiled; gives how to do it again."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            work()
        return graph.replay


@contextmanager
def forbidden_waiting(device: torch.device) -> Iterator[None]:
    """Let the host raise RuntimeError where it would wait for the GPU, which cannot be recorded."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest decode step: its sequences, the tokens of one, and those of the pool."""

    sequences: int
    kv_len: int
    pool_tokens: int
    block_size: int


class DecodeGraphs:
    """Forward passes of decodes, one for each of some numbers of sequences.

    All are recorded before the first request. A model whose pass cannot be recorded, because it
    looks at results on the host, runs without; the log tells why.
    """

    def __init__(
        self,
        backend: AttentionBackend[Any],
        device: torch.device,
        limits: Limits,
        record: Record,
    ) -> None:
        self._backend = backend
        self._device = device
        self._limits = limits
        self._record = record
        self._sizes = list(_sizes(limits.sequences))
        self._recorded: dict[int, Recorded] = {}
        self._logits: Tensor | None = None  # [largest size, V], of whichever pass ran last

    def rehearse(self, forward: Forward) -> bool:
        """Run the largest pass as it is to be recorded; False if it cannot be.

        Layers of every kind must have run before.
        """
        inputs, plan = self._place(self._sizes[-1])
        try:
            with forbidden_waiting(self._device):
                logits = forward(inputs[0], inputs[1], plan, 0)
        except torch.OutOfMemoryError:  # a RuntimeError too, but not one about recording
            raise
        except RuntimeError as error:
            log.warning("decode steps run without CUDA graphs: %s", error)
            return False
        self._logits = torch.empty_like(logits)
        return True

    def record_all(self, forward: Forward) -> None:
        """Record every pass, the largest first, because it takes the most memory."""
        if not self.rehearse(forward):
            self._sizes.clear()
            return
        log.info("recording decode steps of %s sequences", ", ".join(map(str, self._sizes)))
        for size in reversed(self._sizes):
            inputs, plan = self._place(size)
            work = partial(self._run, forward, inputs, plan)
            work()  # numbers of tokens may decide which kernels a library takes
            self._recorded[size] = Recorded(inputs, plan, self._record(work))

    def run(self, batch: StepBatch) -> Tensor | None:
        """Logits of a step; None if it is to be run in the ordinary way."""
        layout = self.padded(batch.layout)
        count, size = len(layout.kv_len), len(layout.slot_mapping)
        decodes = batch.input_ids.shape[1] == count == len(batch.last_idx)
        recorded = self._recorded.get(size)
        if not decodes or recorded is None or self._logits is None:
            return None
        if not recorded.plan.update(layout):
            return None
        inputs = pad(torch.stack([batch.input_ids, batch.position_ids]), (0, size - count))
        recorded.inputs.copy_(upload(inputs.numpy(), self._device))
        recorded.replay()
        return self._logits[:count]

    def padded(self, layout: StepLayout) -> StepLayout:
        """A layout with as many tokens as are recorded for its number of sequences."""
        count = len(layout.slot_mapping)
        size = next((size for size in self._sizes if size >= count), count)
        slots = pad(layout.slot_mapping, (0, size - count), value=-1)
        return replace(layout, slot_mapping=slots)

    def _place(self, size: int) -> tuple[Tensor, FixedPlan]:
        """Inputs and plan of `size` sequences of one token, which are written nowhere."""
        limits = self._limits
        plan = self._backend.fixed_plan(
            size, limits.kv_len, limits.pool_tokens, limits.block_size, self._device
        )
        if plan is None:
            raise RuntimeError("the attention backend has no plans that stay in place")
        plan.update(
            StepLayout(
                cu_q=torch.arange(size + 1, dtype=torch.int32),
                kv_len=torch.ones(size, dtype=torch.int32),
                block_table=torch.zeros(size, 1, dtype=torch.int32),
                slot_mapping=torch.full((size,), -1),
                block_size=limits.block_size,
            )
        )
        return torch.zeros(2, 1, size, dtype=torch.int64, device=self._device), plan

    def _run(self, forward: Forward, inputs: Tensor, plan: FixedPlan) -> None:
        logits = forward(inputs[0], inputs[1], plan, 0)
        if self._logits is not None:
            self._logits[: len(logits)].copy_(logits)


def _sizes(largest: int) -> Iterator[int]:
    """1, 2, 4, 8, then multiples of 8, up to the first that is enough."""
    for size in (1, 2, 4, *range(8, largest + 8, 8)):
        yield size
        if size >= largest:
            return
