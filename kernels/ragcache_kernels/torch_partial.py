"""Attention of some queries over some keys: an output and its log-sum-exp, which can be merged."""

from __future__ import annotations

import torch
from torch import Tensor

from ragcache_kernels.interface import AttentionSpec

# Output [..., Dv], and the logarithm of the softmax's denominator [...] in float32.
Partial = tuple[Tensor, Tensor]

# Torch's tiled CPU kernel; only this form of it also returns the log-sum-exp.
_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    causal: bool,
    mask: Tensor | None,
) -> Partial:
    """Query `[P, H, M, D]` over key `[P, Hkv, c, D]` and value `[P, Hkv, c, Dv]`, H = n·Hkv.

    `causal`: query i sees keys 0 … i. `mask`, float32, broadcasts to `[P, H, M, c]` and is added
    to the scores. Every query must see a key. Of `spec`, `scale` and `softcap` apply.
    """
    if query.device.type == "cpu" and spec.softcap is None and key.shape[-1] == value.shape[-1]:
        out, lse = _cpu_flash(query, key, value, 0.0, causal, attn_mask=mask, scale=spec.scale)
        return out, lse
    return _matmul(query, key, value, spec, causal, mask)


def merge(one: Partial, other: Partial) -> Partial:
    """Results of the same queries over two sets of keys, as one result over both."""
    weight = torch.sigmoid(other[1] - one[1]).unsqueeze(-1)
    return one[0].lerp(other[0], weight), torch.logaddexp(one[1], other[1])


def _matmul(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    causal: bool,
    mask: Tensor | None,
) -> Partial:
    parts, heads, count, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    scores = query.reshape(parts, kv_heads, -1, query.shape[3]) @ key.transpose(2, 3)
    scores = scores.view(parts, heads, count, keys).float() * spec.scale
    if spec.softcap is not None:
        scores = (scores / spec.softcap).tanh() * spec.softcap
    if causal:
        future = torch.ones(count, keys, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(value.dtype)
    out = weights.view(parts, kv_heads, -1, keys) @ value
    return out.view(parts, heads, count, -1), lse
