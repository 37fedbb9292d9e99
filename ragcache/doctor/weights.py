"""What a model's weights take once `serve` has made of them what the kernels read."""

from __future__ import annotations

from ragcache_kernels.native.library import Team
from ragcache_kernels.native.linear import PackedLinear
from torch import nn
from transformers import PreTrainedModel

from ragcache.config import ServeSettings
from ragcache.engine.fast_model import fusible, is_tied
from ragcache.engine.model import check_quantized


def weight_bytes(model: PreTrainedModel, backend: str, settings: ServeSettings) -> int:
    """Of a model without values; raises ConfigError where it cannot be quantised as asked.

    Layers are taken to pass the trial in which `serve` compares them with the plain ones.
    """
    layers, heads = fusible(model)
    check_quantized(settings.quantization, model, backend, len(layers))
    plain: int = sum(parameter.nbytes for parameter in model.parameters())
    if backend != "native" or settings.tensor_parallel_size > 1:  # layers of ranks are not fused
        return plain
    packed = [part for each in layers for part in each.modules() if isinstance(part, nn.Linear)]
    packed += heads
    kept = [head for head in heads if is_tied(head, model)]
    freed = sum(linear.weight.nbytes for linear in packed if linear not in kept)
    return plain - freed + _packed_bytes(packed, quantised=settings.quantization is not None)


def _packed_bytes(linears: list[nn.Linear], *, quantised: bool) -> int:
    """Of each by itself: what is fused takes the same, but for the padding."""
    team = Team(threads=1)
    return sum(
        PackedLinear(team, linear.weight, linear.bias, quantised=quantised).nbytes
        for linear in linears
    )
