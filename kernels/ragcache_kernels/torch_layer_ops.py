"""The steps of a layer in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ragcache_kernels.layer_ops import Activation, LayerOps, Norm, Rotation

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": lambda gate: F.silu(gate, inplace=True),
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


class TorchLayerOps(LayerOps):
    """Few and mostly in-place operations, since each costs microseconds on a CPU."""

    def rms_norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """The rows of hidden `[T, H]`, normalised, in hidden's dtype."""
        normed = F.rms_norm(hidden.float(), hidden.shape[-1:], None, norm.eps)
        return normed.to(norm.weight.dtype).mul_(norm.weight).to(hidden.dtype)

    def add_rms_norm(self, update: Tensor, hidden: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """hidden + update, both `[T, H]`, and that sum normalised."""
        total = hidden + update
        return total, self.rms_norm(total, norm)

    def gated(self, hidden: Tensor, weight: Tensor, activation: Activation) -> Tensor:
        """activation(hidden · gateᵀ) · (hidden · upᵀ), `[T, F]`; weight `[2F, H]`: gate, up.

        Two products, whose results are contiguous: on a CPU as fast as one of both (measured).
        """
        gate, up = weight.chunk(2)
        return _ACTIVATIONS[activation](F.linear(hidden, gate)).mul_(F.linear(hidden, up))


def rotate(qkv: Tensor, kv_heads: int, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Split `[T, Hq + 2·Hkv, D]` into queries, keys and values; the first two are rotated."""
    heads, value = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
    query, key = heads[:, :-kv_heads], heads[:, -kv_heads:]
    if rotation.query_norm is not None and rotation.key_norm is not None:
        ops = TorchLayerOps()
        query, key = ops.rms_norm(query, rotation.query_norm), ops.rms_norm(key, rotation.key_norm)
        heads = torch.cat((query, key), dim=1)
    rotated = _rotate_halves(heads, rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1))
    return rotated[:, :-kv_heads], rotated[:, -kv_heads:], value


def _rotate_halves(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    half = size // 2
    turning, rest = heads[..., :size], heads[..., size:]
    rotated = turning * cos
    rotated[..., :half].addcmul_(turning[..., half:], sin[..., :half], value=-1)
    rotated[..., half:].addcmul_(turning[..., :half], sin[..., half:])
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
