"""What an attention backend is: write this step's keys and values, attend over paged ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ragcache_kernels.layer_ops import LayerOps, Linear, Norm, Rotation
from ragcache_kernels.quantise import as_integers
from ragcache_kernels.torch_layer_ops import rotate


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The geometry of one step, on the host: T packed query tokens of S sequences.

    Query i of sequence s stands at position `kv_len[s] - q_len[s] + i`. Tokens from `cu_q[S]` to
    T are padding: their slot is −1 and their output is zero.
    """

    cu_q: Tensor  # [S+1] int32, prefix sums of the query lengths
    kv_len: Tensor  # [S] int32, context of each sequence after this step
    block_table: Tensor  # [S, maxB] int32, padded with 0
    slot_mapping: Tensor  # [T] int64, where each token's key and value go; −1: nowhere
    block_size: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What differs from layer to layer.

    `window` w: a query at position p sees the keys in (p − w, p]. `softcap` c: scores become
    c·tanh(score/c) (Gemma 2, arXiv 2408.00118). `sinks` [Hq]: one more logit per query head in
    the softmax's denominator (gpt-oss).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the pool; blocks and slots are contiguous.

    With scales, keys and values are quantised (see `quantise`): row · scale is what was written.
    """

    key: Tensor  # [N, B, Hkv, D]
    value: Tensor  # [N, B, Hkv, Dv]
    key_scale: Tensor | None = None  # [N, B, Hkv] float32
    value_scale: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Those that there are; a block is row `block_id` of each of them."""
        every = (self.key, self.value, self.key_scale, self.value_scale)
        return [tensor for tensor in every if tensor is not None]


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A decoder layer: norm and attention, norm and gated MLP, each added to what it got.

    With `update_norms` (Gemma 2) both updates are normalised before they are added.
    """

    input_norm: Norm
    qkv: Linear  # to Hq + 2·Hkv heads of D elements
    heads: int  # Hq
    kv_heads: int
    rotates: bool
    head_norms: tuple[Norm, Norm] | None  # of queries and keys
    spec: AttentionSpec
    out: Linear
    mlp_norm: Norm
    gated: Callable[[Tensor], Tensor]  # activation(gate) · up
    down: Linear
    update_norms: tuple[Norm, Norm] | None


class FixedPlan(Protocol):
    """A plan whose tensors stay where they are, so that launches that read it can be recorded."""

    def update(self, layout: StepLayout) -> bool:
        """Make it the plan of `layout`; False, and no change, where that does not fit."""


PlanT = TypeVar("PlanT")


class AttentionBackend(ABC, Generic[PlanT]):
    """Causal attention with grouped query heads over a pool of blocks, layer by layer.

    Query head h reads KV head `h // (Hq / Hkv)`. What lies in slots that no sequence of the step
    covers, NaN included, never reaches an output.
    """

    name: str
    ops: LayerOps

    @abstractmethod
    def plan(self, layout: StepLayout, device: torch.device) -> PlanT:
        """Do the step's host work once; all layers share the result."""

    @abstractmethod
    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache, plan: PlanT) -> None:
        """Store key `[T, Hkv, D]` and value `[T, Hkv, Dv]` in their slots."""

    def rotate_and_write(
        self, qkv: Tensor, rotation: Rotation, cache: LayerCache, plan: PlanT
    ) -> Tensor:
        """Rotate queries and keys of qkv `[T, Hq + 2·Hkv, D]`, and store the keys and values.

        Returns the queries, `[T, Hq, D]`.
        """
        query, key, value = rotate(qkv, cache.key.shape[2], rotation)
        self.write_kv(key, value, cache, plan)
        return query

    @abstractmethod
    def attend(self, query: Tensor, cache: LayerCache, plan: PlanT, spec: AttentionSpec) -> Tensor:
        """Attention of query `[T, Hq, D]`, after `write_kv`: `[T, Hq, Dv]` in the query's dtype."""

    def whole_layer(self, parts: LayerParts) -> Any:
        """The layer as `run_layers` takes it, where that gains anything; else None."""
        return None

    def run_layers(
        self,
        layers: Sequence[Any],
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        caches: Sequence[LayerCache],
        plan: PlanT,
        keep: Tensor | None = None,
    ) -> Tensor:
        """What layers from `whole_layer` that follow each other make of hidden `[T, H]`.

        The angles are cosines and sines `[T, R]`. The tokens' KV goes to the layers' caches. Only
        the rows `keep` are wanted, of each sequence the last ones or none; None: all.
        """
        raise NotImplementedError(f"{self.name} has no whole layers")

    def laid_out(self, cache: LayerCache, dtype: torch.dtype) -> LayerCache:
        """A cache as the kernels keep it, for activations in `dtype`; see `in_order`."""
        return cache

    def in_order(self, cache: LayerCache, dtype: torch.dtype) -> LayerCache:
        """A cache of the kernels with rows in the order of its shape, as `LayerCache` says.

        Within a block they may be kept otherwise.
        """
        return cache

    def copy_blocks(self, caches: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block src to block dst in every cache; all sources are read before any write."""
        for cache in caches:
            source, target = torch.tensor(pairs, device=cache.device).unbind(1)
            blocks = as_integers(cache)
            blocks.index_copy_(0, target, blocks.index_select(0, source))

    def fixed_plan(
        self,
        tokens: int,
        max_kv_len: int,
        pool_tokens: int,
        block_size: int,
        device: torch.device,
    ) -> FixedPlan | None:
        """A plan whose tensors stay in place, where launches can be recorded; else None.

        It is for steps of `tokens` decodes over up to `max_kv_len` tokens each, out of a pool of
        `pool_tokens`. Layers of every kind must have run before.
        """
        return None

    def prepare(self, layout: StepLayout) -> None:
        """Plan a step that may come next, so that less is left to do if it does."""
