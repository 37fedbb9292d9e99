"""A model whose layers all run fused, without what transformers does around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ragcache.engine.attention import LayerContext, current_context

FAMILIES = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
}


@dataclass(frozen=True, slots=True)
class Logits:
    """What the engine wants of a model's output."""

    logits: Tensor  # [1, S', V]


class FastDecoder:
    """The forward pass of a causal language model: embedding, layers, norm, head.

    transformers also gathers what a caller may ask for, and prepares masks and caches; on a CPU
    that is a tenth of a decode of a small model. Only the `FAMILIES` are known to do no more.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder: Any = model.get_decoder()
        self.plain = model.forward
        self._embed = decoder.embed_tokens
        self._rotary = decoder.rotary_emb
        self._layers = [layer.forward for layer in decoder.layers]
        self._norm = decoder.norm.forward
        self._head = model.get_output_embeddings().forward

    def forward(self, *args: Any, **options: Any) -> Any:
        """Logits of the rows `logits_to_keep` of `input_ids` `[1, T]` at `position_ids`."""
        if not isinstance(current_context(), LayerContext):
            return self.plain(*args, **options)
        hidden = self._embed(options["input_ids"])
        angles = self._rotary(hidden, options["position_ids"])
        for layer in self._layers:
            hidden = layer(hidden, position_embeddings=angles)
        keep = options["logits_to_keep"]
        rows = hidden[:, slice(-keep, None) if isinstance(keep, int) else keep]
        return Logits(self._head(self._norm(rows)))
