"""The steps of a layer in C."""

from __future__ import annotations

import torch
from torch import Tensor

from ragcache_kernels.layer_ops import Activation, Norm
from ragcache_kernels.native import structs
from ragcache_kernels.native.library import Team
from ragcache_kernels.native.linear import PackedLinear
from ragcache_kernels.native.structs import activation, dense, pointer, weight_dtype
from ragcache_kernels.torch_layer_ops import TorchLayerOps

QUANTISED_TOLERANCE = 0.1  # a wrong layer is off by all of what it adds


class NativeLayerOps(TorchLayerOps):
    """Norms in one pass over memory, products by packed copies of the weights."""

    copies_weights = True

    def __init__(self, team: Team, *, quantised: bool = False) -> None:
        """With int8 weights, if `quantised`; see `PackedLinear`."""
        self._team = team
        self._quantised = quantised
        self.tolerance = QUANTISED_TOLERANCE if quantised else 0.0

    def rms_norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """The rows of hidden `[T, H]`, normalised, in hidden's dtype."""
        return self._norm(hidden, None, None, norm)

    def add_rms_norm(self, update: Tensor, hidden: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """hidden + update, both `[T, H]`, and that sum normalised."""
        if update.shape != hidden.shape or update.dtype is not hidden.dtype:
            raise ValueError(f"{update.dtype} {update.shape} to {hidden.dtype} {hidden.shape}")
        total = torch.empty(hidden.shape, dtype=hidden.dtype)
        return total, self._norm(hidden, dense(update), total, norm)

    def _norm(
        self, hidden: Tensor, update: Tensor | None, total: Tensor | None, norm: Norm
    ) -> Tensor:
        hidden = dense(hidden)
        rows, size = hidden.shape
        out = torch.empty(rows, size, dtype=hidden.dtype)
        call = structs.Norm(
            hidden=hidden.data_ptr(),
            update=pointer(update),
            weight=norm.weight.data_ptr(),
            total=pointer(total),
            out=out.data_ptr(),
            hidden_row=hidden.stride(0),
            update_row=0 if update is None else update.stride(0),
            rows=rows,
            size=size,
            dtype=activation(hidden),
            weight_dtype=weight_dtype(norm, hidden.dtype, size),
            eps=norm.eps,
        )
        self._team.library.run_rms_norm(self._team.handle, call)
        return out

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Products by a weight that is given once."""
        return PackedLinear(self._team, weight, bias, quantised=self._quantised)

    def gated_linear(self, weight: Tensor, activation: Activation) -> PackedLinear:
        """What `gated` gives, for a weight that is given once."""
        quantised = self._quantised
        return PackedLinear(self._team, weight, activation=activation, quantised=quantised)
