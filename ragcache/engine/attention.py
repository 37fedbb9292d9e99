"""Our attention, as transformers sees it.

Every attention layer of a supported model calls `paged_attention` with its rotated queries,
keys and values. The function takes the current step from a context variable, because some
models do not hand keyword arguments down to their attention. No mask function is registered
under our name, so transformers builds no mask at all: the backend masks by position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ragcache_kernels.interface import AttentionSpec
from ragcache_kernels.layer_ops import LayerOps, Rotation
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "ragcache_paged"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call: `query` `[T, Hq, Dk]`, `key` `[T, Hkv, Dk]`, `value` `[T, Hkv, Dv]`.

    `options` is whatever else the model passed to its attention function.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    spec: AttentionSpec
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PackedCall:
    """The call of a layer that leaves rotating to the kernels; `qkv` is `[T, Hq + 2·Hkv, D]`."""

    module: nn.Module
    qkv: Tensor
    kv_heads: int
    rotation: Rotation
    spec: AttentionSpec


@dataclass(frozen=True, slots=True)
class LayersCall:
    """The call of decoder layers that are one call of the kernels; `hidden` is `[T, H]`."""

    modules: Sequence[nn.Module]  # their attention
    layers: Sequence[Any]  # see `AttentionBackend.run_layers`
    hidden: Tensor
    angles: tuple[Tensor, Tensor]  # cosines and sines, [T, R]
    keep: Tensor | None = None  # rows that are wanted, of each sequence the last; None: all


class ForwardContext(ABC):
    """What one forward pass does in each attention layer."""

    @abstractmethod
    def attend(self, call: AttentionCall) -> Tensor:
        """The layer's attention, `[T, Hq, Dv]`."""


class LayerContext(ForwardContext):
    """One in which whole layers can run fused (see `fast_layers`)."""

    ops: LayerOps

    @abstractmethod
    def attend_packed(self, call: PackedCall) -> Tensor:
        """The layer's attention, `[T, Hq, D]`, of queries and keys that are not rotated yet."""

    @abstractmethod
    def run_layers(self, call: LayersCall) -> Tensor:
        """The hidden state behind the layers, `[T, H]`."""


_current: ContextVar[ForwardContext | None] = ContextVar("ragcache_forward", default=None)


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the current one of this thread for one forward pass."""
    if _current.get() is not None:
        raise RuntimeError("a forward pass is already running in this thread")
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_context() -> ForwardContext | None:
    """That of the forward pass which runs in this thread."""
    return _current.get()


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function behind `attn_implementation="ragcache_paged"`.

    `query` `[1, Hq, T, Dk]`, `key` and `value` `[1, Hkv, T, D]`; returns `[1, T, Hq, Dv]`.
    """
    context = _current.get()
    if context is None:
        raise RuntimeError("the paged attention runs only inside the engine's forward pass")
    spec = AttentionSpec(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    options["attention_mask"] = attention_mask
    return context.attend(AttentionCall(module, q, k, v, spec, options))[None], None


AttentionInterface.register(NAME, paged_attention)
