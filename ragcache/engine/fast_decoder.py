"""A model whose layers all run fused, without what transformers does around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ragcache.engine.attention import LayerContext, LayersCall, current_context
from ragcache.engine.fast_layers import FastLayer

FAMILIES = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")
}
PIECE = 4096  # positions whose angles are computed at a time


@dataclass(frozen=True, slots=True)
class Logits:
    """What the engine wants of a model's output."""

    logits: Tensor  # [1, S', V]


class FastDecoder:
    """The forward pass of a causal language model: embedding, layers as one call, norm, head.

    transformers also gathers what a caller may ask for, and prepares masks and caches; on a CPU
    that is a tenth of a decode of a small model. Only the `FAMILIES` are known to do no more.
    """

    def __init__(self, model: PreTrainedModel, layers: list[FastLayer]) -> None:
        decoder: Any = model.get_decoder()
        self.plain = model.forward
        self._embed = decoder.embed_tokens
        self._rotary = Angles(decoder.rotary_emb)
        self._attentions = [layer.attention for layer in layers]
        self._layers = [layer.whole for layer in layers]
        self._norm = decoder.norm
        self._head = model.get_output_embeddings()

    def forward(self, *args: Any, **options: Any) -> Any:
        """Logits of the rows `logits_to_keep` of `input_ids` `[1, T]` at `position_ids`."""
        context = current_context()
        if not isinstance(context, LayerContext):
            return self.plain(*args, **options)
        hidden = self._embed(options["input_ids"])[0]
        angles = self._rotary(hidden, options["position_ids"])
        keep = options["logits_to_keep"]
        call = LayersCall(self._attentions, self._layers, hidden, angles, keep)
        return Logits(self._head(self._norm(context.run_layers(call)[None])))


class Angles:
    """Cosines and sines of positions, from a table; models where they change are refused.

    It grows by a piece at a time: the module computes in float32 what is kept in half of that.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._table: tuple[Tensor, ...] = ()

    def __call__(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`[T, R]` each, in hidden's dtype, for positions `[1, T]`."""
        self._grow(hidden, int(positions.max()) + 1)
        cos, sin = self._table
        return cos[positions[0]], sin[positions[0]]

    def _grow(self, hidden: Tensor, count: int) -> None:
        """Have the table hold at least `count` positions."""
        known = len(self._table[0]) if self._table else 0
        if known >= count:
            return
        pieces = [self._compute(hidden, start) for start in range(known, count, PIECE)]
        every = [self._table, *pieces] if known else pieces
        self._table = tuple(torch.cat(tensors) for tensors in zip(*every, strict=True))

    def _compute(self, hidden: Tensor, start: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + PIECE, device=hidden.device)
        cos, sin = self._module(hidden, positions[None])
        return cos[0], sin[0]
