"""What a decoder layer does beside its attention, for packed tokens `[T, …]`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

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


class LayerOps(ABC):
    """The steps between the matrix products of a layer, fused where the device gains by it."""

    @abstractmethod
    def rms_norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """The rows of hidden `[T, H]`, normalised, in hidden's dtype."""

    @abstractmethod
    def add_rms_norm(self, update: Tensor, hidden: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """hidden + update, both `[T, H]`, and that sum normalised."""

    @abstractmethod
    def gated(self, hidden: Tensor, weight: Tensor, activation: Activation) -> Tensor:
        """activation(hidden · gateᵀ) · (hidden · upᵀ), `[T, F]`; weight `[2F, H]`: gate, up."""
