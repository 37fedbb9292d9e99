"""Torch's own attention over pages, to compare with; it depends on what is installed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragcache_kernels.bench.clock import Call
from ragcache_kernels.bench.layer import Layer
from ragcache_kernels.interface import StepLayout

IMPLEMENTATIONS = ("FA3", "FA4")


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why something cannot be run here."""

    reason: str


def varlen_decodes(layer: Layer, query: Tensor, step: StepLayout) -> tuple[str, Call | Unavailable]:
    """`varlen_attn` with a block table, under the first implementation that takes it.

    FlashAttention-3 (arXiv 2407.08608) and 4 come in packages of their own, and stay active in
    this process for all of torch's attention.
    """
    reasons = []
    for name in IMPLEMENTATIONS:
        try:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl(name)
            call = _call(layer, query, step)
            call()
        except (ImportError, TypeError, ValueError, RuntimeError, AssertionError) as error:
            reasons.append(f"{name}: {str(error).splitlines()[0]}")
        else:
            return f"torch's varlen_attn, {name}", call
    return "torch's varlen_attn", Unavailable("; ".join(reasons))


def _call(layer: Layer, query: Tensor, step: StepLayout) -> Call:
    from torch.nn.attention.varlen import varlen_attn

    cu_q, kv_len, table = (
        tensor.to(layer.device) for tensor in (step.cu_q, step.kv_len, step.block_table)
    )
    return lambda: varlen_attn(
        query,
        layer.cache.key,
        layer.cache.value,
        cu_q,
        None,
        1,
        int(step.kv_len.max()),
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=kv_len,
        block_table=table,
    )
