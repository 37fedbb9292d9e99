"""Attention of query tiles over ranges of paged keys: partial results and their log-sum-exp.

One kernel for decodes, chunks, split keys and shared prefixes; what differs is the list of tiles
(FlashInfer, arXiv 2501.01005). The rows of a tile are its queries times the query heads of one KV
head, so that a key is loaded once for all of them. Softmax runs in base 2 (FlashAttention-2, arXiv
2307.08691) and float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _fold(
    acc,
    top,
    total,
    q,
    position,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    start,
    stop,
    k_block,
    k_slot,
    v_block,
    v_slot,
    scale,
    softcap,
    window,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the keys in [start, stop) into the running softmax of the rows."""
    dims = tl.arange(0, q.shape[1])
    value_dims = tl.arange(0, acc.shape[1])
    for n in range(start, stop, BN):
        keys = n + tl.arange(0, BN)
        # Slots behind the last key may hold NaN, and 0 * NaN is NaN: they must not be loaded.
        inside = keys < stop
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = keys % BLOCK_SIZE
        k_at = k_ptr + block * k_block + slot * k_slot
        v_at = v_ptr + block * v_block + slot * v_slot
        k = tl.load(
            k_at[:, None] + dims[None, :],
            mask=inside[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        v = tl.load(
            v_at[:, None] + value_dims[None, :],
            mask=inside[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if k_scale_ptr is not None:
            scale_at = (block * BLOCK_SIZE + slot) * tl.num_programs(1)
            scores *= tl.load(k_scale_ptr + scale_at, mask=inside, other=0.0)[None, :]
        if SOFTCAP:
            doubled = tl.exp2(scores * (2.0 * LOG2E / softcap))
            scores = softcap * (1.0 - 2.0 / (doubled + 1.0))  # tanh
        seen = inside[None, :]
        if MASKED:
            seen = seen & (keys[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (keys[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may see nothing yet
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if v_scale_ptr is not None:
            weights *= tl.load(v_scale_ptr + scale_at, mask=inside, other=0.0)[None, :]
        acc += tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["window"])
def attend_tiles(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    tiles_ptr,
    count_ptr,
    tokens_ptr,
    positions_ptr,
    out_ptr,
    lse_ptr,
    q_token,
    q_head,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    heads,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PERSISTENT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Program (i, h): tile i (see `tiles.Tiles`) for KV head h; in place of a tile's sequence
    stands where its row of the block table begins.

    With scales (None: without), a key's is folded into its scores, a value's into its weights.
    If `PERSISTENT`, there are `count[0]` tiles, shared out among however many programs: so the
    number of tiles may change where the launch is recorded. Partial p and query head:
    `out[p, head]` float32, normalised, and `lse[p, head]` in log2 units, -inf where a query sees
    no key of the tile.
    """
    head = tl.program_id(1).to(tl.int64)
    k_ptr += head * k_head
    v_ptr += head * v_head
    if k_scale_ptr is not None:
        k_scale_ptr += head
        v_scale_ptr += head
    rows = tl.arange(0, BM)
    query = rows // GROUP
    query_head = head * GROUP + rows % GROUP
    dims = tl.arange(0, PADDED_DIM)
    value_dims = tl.arange(0, PADDED_VALUE_DIM)

    first = tl.program_id(0)
    for i in range(
        first,
        tl.load(count_ptr) if PERSISTENT else first + 1,
        tl.num_programs(0) if PERSISTENT else 1,
    ):
        tile = tiles_ptr + i * 7
        first_token = tl.load(tile)
        queries = tl.load(tile + 1)
        row_ptr = table_ptr + tl.load(tile + 2)
        start = tl.load(tile + 3)
        stop = tl.load(tile + 4)
        all_see = tl.load(tile + 5)
        base = tl.load(tile + 6).to(tl.int64)

        valid = query < queries
        token = tl.load(tokens_ptr + first_token + query, mask=valid, other=0).to(tl.int64)
        position = tl.load(positions_ptr + token, mask=valid, other=0)
        q = tl.load(
            q_ptr + (token * q_token + query_head * q_head)[:, None] + dims[None, :],
            mask=valid[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        if UPCAST:
            q = q.to(tl.float32)
        acc = tl.zeros([BM, PADDED_VALUE_DIM], tl.float32)
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)

        # Whole steps of keys that all queries see need no look at the positions.
        whole = start + tl.maximum(all_see - start, 0) // BN * BN
        acc, top, total = _fold(
            acc, top, total, q, position, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, row_ptr,
            start, whole, k_block, k_slot, v_block, v_slot, scale, softcap, window,
            DIM, VALUE_DIM, BLOCK_SIZE, BN, SOFTCAP, WINDOW, False,
        )  # fmt: skip
        acc, top, total = _fold(
            acc, top, total, q, position, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, row_ptr,
            whole, stop, k_block, k_slot, v_block, v_slot, scale, softcap, window,
            DIM, VALUE_DIM, BLOCK_SIZE, BN, SOFTCAP, WINDOW, True,
        )  # fmt: skip

        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        lse = tl.where(total > 0.0, top + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        at = (base + query) * heads + query_head
        tl.store(lse_ptr + at, lse, mask=valid)
        tl.store(
            out_ptr + at[:, None] * VALUE_DIM + value_dims[None, :],
            acc,
            mask=valid[:, None] & (value_dims < VALUE_DIM)[None, :],
        )


@triton.jit
def merge_partials(
    partial_ptr,
    lse_ptr,
    ends_ptr,
    order_ptr,
    sinks_ptr,
    out_ptr,
    heads,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BH: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Program (t, i): the partials of token t, `order[ends[t] : ends[t + 1]]`, for BH query heads.

    `out` `[T, heads, VALUE_DIM]`; zeros for a token without partials. A sink is one more logit,
    without a value.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    valid = head < heads
    dims = tl.arange(0, PADDED_VALUE_DIM)
    inside = (dims < VALUE_DIM)[None, :]
    top = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, PADDED_VALUE_DIM], tl.float32)
    for i in range(tl.load(ends_ptr + token), tl.load(ends_ptr + token + 1)):
        at = tl.load(order_ptr + i).to(tl.int64) * heads + head
        lse = tl.load(lse_ptr + at, mask=valid, other=float("-inf"))
        saw = lse > float("-inf")
        # What saw no key is not even loaded: it weighs nothing, and may be NaN.
        partial = tl.load(
            partial_ptr + at[:, None] * VALUE_DIM + dims[None, :],
            mask=saw[:, None] & inside,
            other=0.0,
        )
        new_top = tl.maximum(top, lse)
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(lse - finite)
        shrink = tl.exp2(top - finite)
        acc = acc * shrink[:, None] + partial * weight[:, None]
        total = total * shrink + weight
        top = new_top
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - new_top)
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        out_ptr + ((token * heads + head) * VALUE_DIM)[:, None] + dims[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=valid[:, None] & inside,
    )
