"""RMSNorm of rows, with the sum before it in the same pass."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weighted(rows, scale, weight):
    """Rows · scale, rounded to the weight's dtype as models do, times the weight; in float32."""
    return (rows * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def norm_rows(
    hidden_ptr,
    update_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    hidden_row,
    update_row,
    eps,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
):
    """Program t: row t of `hidden`, plus that of `update` if there is one; the outputs are dense.

    The sum is rounded before it is normalised: the next layers go on from the rounded one.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED_SIZE)
    inside = at < SIZE
    x = tl.load(hidden_ptr + row * hidden_row + at, mask=inside, other=0.0).to(tl.float32)
    if update_ptr is not None:
        x += tl.load(update_ptr + row * update_row + at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * SIZE + at, total, mask=inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    normed = weighted(x, tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps), weight)
    tl.store(out_ptr + row * SIZE + at, normed.to(out_ptr.dtype.element_ty), mask=inside)
