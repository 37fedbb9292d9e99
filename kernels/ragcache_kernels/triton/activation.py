"""The product of a gated MLP's two halves, the gate's activated."""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 1024  # elements of a program

_GELU_SLOPE: tl.constexpr = tl.constexpr(1.5957691216057308)  # 2 · sqrt(2/π)
_GELU_CUBIC: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def gate_rows(
    gate_up_ptr,
    out_ptr,
    gate_up_row,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (t, c): chunk c of row t; `gate_up` `[T, 2·SIZE]` has the gate first, `out` is dense.

    GELU is the approximation with tanh (arXiv 1606.08415), and (1 + tanh(u)) / 2 = sigmoid(2u).
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < SIZE
    gate_at = gate_up_ptr + row * gate_up_row + at
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + SIZE, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if GELU:
        slope = _GELU_SLOPE * (gate + _GELU_CUBIC * gate * gate * gate)
    dtype = out_ptr.dtype.element_ty
    # Below that the sigmoid is nothing, and its exponential would soon be infinite.
    active = (gate * tl.sigmoid(tl.maximum(slope, -80.0))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * SIZE + at, (active * up).to(dtype), mask=inside)
