"""What a decoder layer does beside its attention, for packed tokens `[T, …]`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from torch import Tensor
from torch.nn import functional as F

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm (arXiv 1910.07467) over the last dimension, in float32.

    The normalised rows are rounded to the weight's dtype before they are multiplied by it. So
    Llama's weight is in the model's dtype, and Gemma's, which is 1 + w, in float32.
    """

    weight: Tensor  # [H]
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """What queries and keys go through before attention: a norm of each head, then rotation.

    The first R elements of a head turn as two halves (RoPE, arXiv 2104.09864, in the layout of
    GPT-NeoX); the others stay.
    """

    cos: Tensor  # [T, R], both halves alike
    sin: Tensor
    query_norm: Norm | None = None  # of D elements
    key_norm: Norm | None = None


class Linear(Protocol):
    """A weight `[out, in]`, with a bias or without, as a device multiplies by it."""

    def __call__(self, rows: Tensor) -> Tensor:
        """rows · weightᵀ + bias, `[T, in]` to `[T, out]`."""

    def add_to(self, total: Tensor, rows: Tensor) -> Tensor:
        """The same added to total `[T, out]`, in place."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A weight as it is, for torch."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(rows, self.weight, self.bias)

    def add_to(self, total: Tensor, rows: Tensor) -> Tensor:
        """See `Linear`."""
        total.addmm_(rows, self.weight.T)
        return total if self.bias is None else total.add_(self.bias)


class LayerOps(ABC):
    """The steps of a layer, fused where the device gains by it."""

    copies_weights = False  # whether `linear` and `gated_linear` leave the weights to be freed
    tolerance = 0.0  # how far off, relatively, results may be for other reasons than rounding

    @abstractmethod
    def rms_norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """The rows of hidden `[T, H]`, normalised, in hidden's dtype."""

    @abstractmethod
    def add_rms_norm(self, update: Tensor, hidden: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """hidden + update, both `[T, H]`, and that sum normalised."""

    @abstractmethod
    def gated(self, hidden: Tensor, weight: Tensor, activation: Activation) -> Tensor:
        """activation(hidden · gateᵀ) · (hidden · upᵀ), `[T, F]`; weight `[2F, H]`: gate, up."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Products by a weight that is given once."""
        return PlainLinear(weight, bias)

    def gated_linear(self, weight: Tensor, activation: Activation) -> Callable[[Tensor], Tensor]:
        """What `gated` gives, for a weight that is given once."""
        return partial(self.gated, weight=weight, activation=activation)
