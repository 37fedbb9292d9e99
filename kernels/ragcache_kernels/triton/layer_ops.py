"""The steps of a layer on a GPU: one launch each, beside the products of matrices."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from ragcache_kernels.layer_ops import Activation, LayerOps, Norm
from ragcache_kernels.triton.activation import CHUNK, gate_rows
from ragcache_kernels.triton.norm import norm_rows


class TritonLayerOps(LayerOps):
    """Rows are reduced by one program each; sums and activations are float32."""

    def rms_norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """The rows of hidden `[T, H]`, normalised, in hidden's dtype."""
        return _norm(hidden, None, None, norm)

    def add_rms_norm(self, update: Tensor, hidden: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """hidden + update, both `[T, H]`, and that sum normalised."""
        total = hidden.new_empty(hidden.shape)
        return total, _norm(hidden, update, total, norm)

    def gated(self, hidden: Tensor, weight: Tensor, activation: Activation) -> Tensor:
        """activation(hidden · gateᵀ) · (hidden · upᵀ), `[T, F]`; weight `[2F, H]`: gate, up."""
        gate_up = F.linear(hidden, weight)
        tokens, size = len(gate_up), len(weight) // 2
        out = gate_up.new_empty(tokens, size)
        gate_rows[(tokens, triton.cdiv(size, CHUNK))](
            gate_up, out, gate_up.stride(0), SIZE=size, GELU=activation == "gelu_tanh", CHUNK=CHUNK
        )
        return out


def _norm(hidden: Tensor, update: Tensor | None, total: Tensor | None, norm: Norm) -> Tensor:
    tokens, size = hidden.shape
    out = torch.empty((tokens, size), dtype=hidden.dtype, device=hidden.device)
    padded = triton.next_power_of_2(size)
    norm_rows[(tokens,)](
        hidden,
        update,
        norm.weight,
        total,
        out,
        hidden.stride(0),
        0 if update is None else update.stride(0),
        norm.eps,
        SIZE=size,
        PADDED_SIZE=padded,
        num_warps=norm_warps(padded),
    )
    return out


def norm_warps(padded_size: int) -> int:
    """Warps of a program, so that a thread has 16 to 32 elements of a row."""
    return min(16, max(4, padded_size // 1024))
