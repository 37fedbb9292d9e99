"""Attention written down plainly in float64, densely per sequence: what backends must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from ragcache_kernels.interface import AttentionSpec, LayerCache, StepLayout
from ragcache_kernels.quantise import as_integers


def reference_attention(
    query: Tensor, cache: LayerCache, layout: StepLayout, spec: AttentionSpec
) -> Tensor:
    """Output `[T, Hq, Dv]` in float64 for a cache that holds the step's keys and values already."""
    out = query.new_zeros(*query.shape[:2], cache.value.shape[-1], dtype=torch.float64)
    for s, length in enumerate(layout.kv_len.tolist()):
        positions = torch.arange(length)
        blocks = layout.block_table[s].long()[positions // layout.block_size]
        slots = blocks * layout.block_size + positions % layout.block_size
        tokens = slice(*layout.cu_q[s : s + 2].tolist())
        key = _read(cache.key, cache.key_scale, slots)
        value = _read(cache.value, cache.value_scale, slots)
        out[tokens] = attend_sequence(query[tokens].double(), key, value, spec)
    return out


def _read(cache: Tensor, scale: Tensor | None, slots: Tensor) -> Tensor:
    """Rows `[L, Hkv, …]` in float64."""
    rows = as_integers(cache).flatten(0, 1)[slots].view(cache.dtype).double()
    return rows if scale is None else rows * scale.flatten(0, 1)[slots].unsqueeze(-1)


def attend_sequence(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """The last queries `[T, Hq, D]` of a sequence over all its keys and values `[L, Hkv, …]`.

    In the dtype of its arguments.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = torch.einsum("thd,lhd->htl", query, key) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    behind = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
    seen = (behind >= 0) & (behind < (spec.window or len(key)))
    logits = logits.masked_fill(~seen, -torch.inf)
    if spec.sinks is not None:
        sinks = spec.sinks.to(logits.dtype)[:, None, None].expand(-1, len(query), 1)
        logits = torch.cat([logits, sinks], dim=2)
    weights = logits.softmax(dim=2)[:, :, : len(key)]
    return torch.einsum("htl,lhd->thd", weights, value)
