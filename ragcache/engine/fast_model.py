"""Which layers of a model are run by `fast_layers`.

A layer must be one of transformers' own, untouched and with plain weights. Whether ours does the
same is not left to reading its attributes: both run on the same input first. So another release of
transformers, whose parts may have other names, or a setting that we do not know, costs speed and
neither correctness nor the start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from ragcache_kernels.interface import AttentionBackend, AttentionSpec, LayerCache, StepLayout
from ragcache_kernels.reference import attend_sequence
from torch import Tensor, nn
from transformers import PreTrainedModel

from ragcache.engine import fast_decoder
from ragcache.engine.attention import (
    AttentionCall,
    LayerContext,
    LayersCall,
    PackedCall,
    forward_context,
)
from ragcache.engine.fast_decoder import FastDecoder
from ragcache.engine.fast_layers import ACTIVATIONS, FastHead, FastLayer, FastNorm, free_weights

log = logging.getLogger(__name__)

FAMILIES = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}DecoderLayer"
    for name in ("Gemma", "Gemma2", "Gemma3", "Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")
}
Fast = TypeVar("Fast", FastLayer, FastNorm, FastHead)
_MISTAKES = AttributeError, LookupError, TypeError, ValueError, RuntimeError
TRIAL_TOKENS = 8
TRIAL_BLOCK = 16  # as in serving: kernels may keep the rows of such blocks in another order
LEAST_TOLERANCE = 2e-4  # of float32, whose rounding adds up over a layer
_LAYOUT = StepLayout(
    cu_q=torch.tensor([0, TRIAL_TOKENS], dtype=torch.int32),
    kv_len=torch.tensor([TRIAL_TOKENS], dtype=torch.int32),
    block_table=torch.zeros(1, 1, dtype=torch.int32),
    slot_mapping=torch.arange(TRIAL_TOKENS),
    block_size=TRIAL_BLOCK,
)


def use_fast_layers(
    model: PreTrainedModel, backend: AttentionBackend[Any], *, keep_plain: bool = True
) -> int:
    """Make a prepared model run fused where it can; returns how many of its layers do.

    Unless the plain model is to be kept, weights that the kernels have copies of are freed.
    """
    decoder: Any = model.get_decoder()
    layers, heads = fusible(model)
    if not layers:
        return 0
    norms = [decoder.norm] if hasattr(decoder, "norm") else []
    trial = _Trial(model, backend, [*layers, *norms, *heads])
    frees = backend.ops.copies_weights and not keep_plain
    fused = {layer: trial.replace(layer, trial.fast_layer, frees) for layer in layers}
    for norm in norms:
        trial.replace(norm, FastNorm)
    for head in heads:
        trial.replace(head, trial.fast_head, frees and not is_tied(head, model))
    whole = [fast for layer in decoder.layers if (fast := fused.get(layer)) and fast.whole]
    if len(whole) == len(decoder.layers) and _name(model) in fast_decoder.FAMILIES:
        trial.replace_forward(model, whole)
    count = sum(fast is not None for fast in fused.values())
    log.info("%d of %d layers run fused", count, len(decoder.layers))
    return count


def runs_as_fast_decoder(model: PreTrainedModel) -> bool:
    """Whether nothing of the model but its embedding is run by torch."""
    forwards = [model.forward, getattr(model.get_output_embeddings(), "forward", None)]
    return [type(getattr(each, "__self__", None)) for each in forwards] == [FastDecoder, FastHead]


def may_run_as_fast_decoder(model: PreTrainedModel) -> bool:
    """Whether that will be tried; values are not looked at."""
    layers, heads = fusible(model)
    known = _name(model) in fast_decoder.FAMILIES
    return known and bool(heads) and len(layers) == model.config.num_hidden_layers


def fusible(model: PreTrainedModel) -> tuple[list[Any], list[nn.Linear]]:
    """The layers that can be tried, and the head where there are any; values are not looked at."""
    decoder: Any = model.get_decoder()
    layers = [layer for layer in getattr(decoder, "layers", ()) if _is_supported(layer)]
    heads = [head for head in [model.get_output_embeddings()] if layers and _is_plain_head(head)]
    return layers, heads


def is_tied(head: nn.Linear, model: PreTrainedModel) -> bool:
    """Whether the weight is the embedding's as well, so that it stays beside its copy."""
    return head.weight is model.get_input_embeddings().weight


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _is_supported(layer: Any) -> bool:
    if _name(layer) not in FAMILIES:
        return False
    try:
        return _has_plain_parts(layer)
    except AttributeError as error:
        log.warning("%s does not run fused: %s", type(layer).__name__, error)
        return False


def _has_plain_parts(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    heads = [attention.q_proj, attention.k_proj, attention.v_proj]
    halves = [mlp.gate_proj, mlp.up_proj]
    return (
        all(_is_untouched(part) for part in layer.modules())
        and type(mlp.act_fn) in ACTIVATIONS
        and _can_be_one([*heads, attention.o_proj])
        and len({linear.bias is None for linear in heads}) == 1
        and _can_be_one([*halves, mlp.down_proj])
        and all(linear.bias is None for linear in (*halves, mlp.down_proj))
    )


def _is_plain_head(head: Any) -> bool:
    return type(head) is nn.Linear and _is_untouched(head)


def _is_untouched(module: nn.Module) -> bool:
    """No hook, no other forward pass, and no parameters that are more than their values."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    return all(type(each) is nn.Parameter for each in module.parameters(recurse=False))


def _can_be_one(linears: list[nn.Linear]) -> bool:
    if any(type(linear) is not nn.Linear for linear in linears):
        return False
    return len({(linear.weight.dtype, linear.weight.device) for linear in linears}) == 1


class _Trial(LayerContext):
    """A forward pass over a few tokens with plain modules: what each got and gave, to compare.

    Fused modules are tried with the kernels that will run them; where those do not do whole layers,
    but for the attention itself.
    """

    def __init__(
        self, model: PreTrainedModel, backend: AttentionBackend[Any], modules: list[nn.Module]
    ) -> None:
        self.ops = backend.ops
        self._backend = backend
        self._plan = backend.plan(_LAYOUT, model.device)
        self.specs: dict[nn.Module, AttentionSpec] = {}
        self._shapes: dict[nn.Module, torch.Size] = {}  # of a token's keys
        self._calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], Tensor]] = {}
        hooks = [each.register_forward_hook(self._record, with_kwargs=True) for each in modules]
        tokens = torch.arange(TRIAL_TOKENS, device=model.device)[None]
        with torch.inference_mode(), forward_context(self):
            model(input_ids=tokens, position_ids=7 * tokens, use_cache=False, logits_to_keep=1)
        for hook in hooks:
            hook.remove()

    def _record(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        self._calls[module] = args, kwargs, output

    def attend(self, call: AttentionCall) -> Tensor:
        self.specs[call.module] = call.spec
        self._shapes[call.module] = call.key.shape[1:]
        return _attend(call.query, call.key, call.value, call.spec)

    def run_layers(self, call: LayersCall) -> Tensor:
        caches = [_cache(call.hidden, *self._shapes[module]) for module in call.modules]
        inputs = call.layers, call.hidden, call.angles, caches, self._plan
        return self._backend.run_layers(*inputs, call.keep)

    def attend_packed(self, call: PackedCall) -> Tensor:
        cache = _cache(call.qkv, call.kv_heads, call.qkv.shape[2])
        query = self._backend.rotate_and_write(call.qkv, call.rotation, cache, self._plan)
        cache = self._backend.in_order(cache, query.dtype)
        key, value = cache.key[0, :TRIAL_TOKENS], cache.value[0, :TRIAL_TOKENS]
        return _attend(query, key, value, call.spec)

    def fast_layer(self, layer: Any) -> FastLayer:
        """A layer like the plain one; raises whatever comes of parts that are not as expected."""
        return FastLayer(layer, self.specs[layer.self_attn], self._backend)

    def fast_head(self, head: nn.Linear) -> FastHead:
        """A head like the plain one."""
        return FastHead(head, self.ops)

    def replace(
        self, module: nn.Module, make: Callable[[Any], Fast], frees_weights: bool = False
    ) -> Fast | None:
        """Let what `make` gives be the module's forward pass; None if it does not do the same."""
        name = type(module).__name__
        try:
            fast = make(module)
            agrees = self._agrees(fast, *self._calls[module])
        except torch.OutOfMemoryError:
            raise
        except _MISTAKES as error:
            log.warning("%s does not run fused: %r", name, error)
            return None
        if not agrees:
            log.warning("%s does not run fused: its results would differ", name)
            return None
        module.forward = fast.forward
        if frees_weights and not isinstance(fast, FastNorm):
            free_weights(module, fast)
        return fast

    def replace_forward(self, model: PreTrainedModel, layers: list[FastLayer]) -> None:
        """Let a `FastDecoder` run the model, if it gives the same bits."""
        tokens = torch.arange(TRIAL_TOKENS, device=model.device)
        inputs = {"input_ids": tokens[None], "position_ids": 7 * tokens[None]}
        options: dict[str, Any] = {**inputs, "logits_to_keep": tokens[-1:]}
        try:
            fast = FastDecoder(model, layers)
            with torch.inference_mode(), forward_context(self):
                ours = fast.forward(**options).logits
                agrees = torch.equal(ours, model(**options, use_cache=False).logits)
        except _MISTAKES as error:
            log.warning("%s runs as it is: %r", type(model).__name__, error)
            return
        if agrees:
            model.forward = fast.forward
        else:
            log.warning("%s runs as it is: its results would differ", type(model).__name__)

    def _agrees(
        self,
        fast: FastLayer | FastNorm | FastHead,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> bool:
        """Whether both update their input alike, within the rounding of its dtype."""
        with torch.inference_mode(), forward_context(self):
            error = (fast.forward(*args, **kwargs) - output).float().norm()
            before = args[0] if args[0].shape == output.shape else torch.zeros_like(output)
            update = (output - before).float().norm()
        epsilon = torch.finfo(output.dtype).eps
        tolerance = max(8 * epsilon, LEAST_TOLERANCE, self.ops.tolerance)
        return bool(error <= tolerance * update + epsilon * output.float().norm())


def _cache(like: Tensor, kv_heads: int, dim: int) -> LayerCache:
    return LayerCache(*like.new_empty(2, 1, TRIAL_BLOCK, kv_heads, dim))


def _attend(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    q, k, v = (each.float() for each in (query, key, value))
    return attend_sequence(q, k, v, spec).to(query.dtype)
