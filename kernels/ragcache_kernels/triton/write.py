"""Keys and values into their slots."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_tokens(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
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
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    heads = tl.arange(0, PADDED_HEADS)[:, None]
    dims = tl.arange(0, PADDED_DIM)[None, :]
    inside = (heads < HEADS) & (dims < DIM)
    key = tl.load(key_ptr + token * key_token + heads * key_head + dims, mask=inside)
    tl.store(k_ptr + block * k_block + offset * k_slot + heads * k_head + dims, key, mask=inside)
    dims = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    inside = (heads < HEADS) & (dims < VALUE_DIM)
    value = tl.load(value_ptr + token * value_token + heads * value_head + dims, mask=inside)
    tl.store(v_ptr + block * v_block + offset * v_slot + heads * v_head + dims, value, mask=inside)
