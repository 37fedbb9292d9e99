"""Keys and values into their slots."""

from __future__ import annotations

import triton
import triton.language as tl

from ragcache_kernels import quantise

_SMALLEST: tl.constexpr = tl.constexpr(quantise.SMALLEST)


@triton.jit
def store_heads(
    rows,
    slot,
    cache_ptr,
    scale_ptr,
    cache_block,
    cache_slot,
    cache_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Store the rows of all heads of one token, `[HEADS, DIM]` padded with zeros, in its slot.

    Quantised, like `quantise.quantise`, if `scale_ptr` is not None; what the cache consists of
    decides how.
    """
    heads = tl.arange(0, rows.shape[0])
    dims = tl.arange(0, rows.shape[1])
    slot = slot.to(tl.int64)
    if scale_ptr is not None:
        rows = rows.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(rows), 1), _SMALLEST)
        if cache_ptr.dtype.element_ty == tl.int8:
            scale = scale / 127.0
            rows = tl.floor(rows / scale[:, None] + 0.5)
        else:
            scale = scale / 448.0
            rows = rows / scale[:, None]
        tl.store(scale_ptr + slot * HEADS + heads, scale, mask=heads < HEADS)
    start = cache_ptr + slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_slot
    tl.store(
        start + (heads * cache_head)[:, None] + dims[None, :],
        rows.to(cache_ptr.dtype.element_ty),
        mask=(heads < HEADS)[:, None] & (dims < DIM)[None, :],
    )


@triton.jit
def write_tokens(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slots_ptr,
    key_token,
    key_head,
    value_token,
    value_head,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program t: all heads of token t; a slot of -1 is padding."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    heads = tl.arange(0, PADDED_HEADS)[:, None]
    dims = tl.arange(0, PADDED_DIM)[None, :]
    inside = (heads < HEADS) & (dims < DIM)
    key = tl.load(key_ptr + token * key_token + heads * key_head + dims, mask=inside, other=0.0)
    store_heads(key, slot, k_ptr, k_scale_ptr, k_block, k_slot, k_head, HEADS, DIM, BLOCK_SIZE)
    dims = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    inside = (heads < HEADS) & (dims < VALUE_DIM)
    value = tl.load(
        value_ptr + token * value_token + heads * value_head + dims, mask=inside, other=0.0
    )
    store_heads(
        value, slot, v_ptr, v_scale_ptr, v_block, v_slot, v_head, HEADS, VALUE_DIM, BLOCK_SIZE
    )
