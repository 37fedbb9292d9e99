"""Which models are right on a paged cache, and what their layers look like.

A model is supported when every layer is full or sliding-window attention that goes through
transformers' AttentionInterface. Anything else (recurrent state, chunked attention, position
biases, encoders) would run and be silently wrong, so it is refused with the reason.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ragcache.engine.attention import NAME, AttentionCall, ForwardContext, forward_context
from ragcache.engine.pool import LayerShape
from ragcache.errors import UnsupportedModel

LAYER_TYPES = {"full_attention", "sliding_attention"}

# What models pass to their attention without changing its result at inference.
HARMLESS_OPTIONS = {
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
}


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what the configuration alone gives away, before any weight is loaded.

    Raises:
        UnsupportedModel: with the reason.
    """
    if config.is_encoder_decoder:
        raise _refusal(config, "it is an encoder-decoder")
    text = config.get_text_config()
    unknown = set(getattr(text, "layer_types", None) or []) - LAYER_TYPES
    if unknown:
        raise _refusal(config, f"it has layers of type {', '.join(sorted(unknown))}")
    moving = {"dynamic", "longrope"} & _rope_types(text)
    if moving:
        raise _refusal(config, f"its {moving.pop()} RoPE turns KV with the longest request")
    if getattr(text, "alibi", False):
        raise _refusal(config, "it uses ALiBi position biases")


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The RoPE types of all layers; some models have one set of parameters per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return {each.get("rope_type", "default") for each in [parameters, *nested]}


def prepare_model(model: PreTrainedModel) -> list[LayerShape]:
    """Switch the model to paged attention and return the shape of each layer's KV.

    Raises:
        UnsupportedModel: when answers on the paged cache could be wrong.
    """
    check_config(model.config)
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        raise _refusal(model.config, "it counts positions by itself")
    if "logits_to_keep" not in parameters:
        raise _refusal(model.config, "it cannot give logits of chosen tokens")
    model.set_attn_implementation(NAME)
    for config in (model.config, model.config.get_text_config()):
        if config._attn_implementation != NAME:
            raise _refusal(model.config, "its attention does not go through AttentionInterface")
    probe = _Probe(model.config)
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with torch.inference_mode(), forward_context(probe):
        model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1)
    return probe.layers()


def _refusal(config: PreTrainedConfig, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"model type {config.model_type} is not supported: {reason}")


class _Probe(ForwardContext):
    """A forward context for one token, which records what each layer calls."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._layers: dict[int, LayerShape] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        index = getattr(call.module, "layer_idx", None)
        if not isinstance(index, int) or index in self._layers:
            raise _refusal(self._config, "its attention layers are not numbered one by one")
        if not getattr(call.module, "is_causal", True) or call.options.get("is_causal") is False:
            raise _refusal(self._config, "its attention is not causal")
        # The order in which kernels keep rows depends on it: one writes them, another one reads.
        if not call.query.dtype is call.key.dtype is call.value.dtype:
            raise _refusal(self._config, "its queries, keys and values have different dtypes")
        for name, option in call.options.items():
            if option is not None and name not in HARMLESS_OPTIONS:
                raise _refusal(self._config, f"it passes {name!r} to its attention")
        self._layers[index] = LayerShape(call.key.shape[1], call.key.shape[2], call.value.shape[2])
        # One token attends to itself alone, so the result is its value.
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)

    def layers(self) -> list[LayerShape]:
        expected = self._config.get_text_config().num_hidden_layers
        if sorted(self._layers) != list(range(expected)):
            raise _refusal(
                self._config, f"{len(self._layers)} of its {expected} layers have paged attention"
            )
        return [self._layers[index] for index in range(expected)]
