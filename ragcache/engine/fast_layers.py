"""Decoder layers of the common families with fused projections and kernels.

They do what transformers' layers do, in the same order, over the same weights: the weight of each
fused product is made once, and the parameters of the model become views of it. Outside of the
engine's forward pass a layer runs as transformers wrote it, until its weights are freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from ragcache_kernels.interface import AttentionBackend, AttentionSpec, LayerParts
from ragcache_kernels.layer_ops import Activation, LayerOps, Linear, Norm, Rotation
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ragcache.engine.attention import (
    AttentionCall,
    LayerContext,
    LayersCall,
    PackedCall,
    current_context,
)

ACTIVATIONS: dict[type[nn.Module], Activation] = {
    type(ACT2FN["silu"]): "silu",
    type(ACT2FN["swish"]): "silu",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
}


class FastNorm:
    """An RMSNorm of Llama's or of Gemma's kind, as the forward pass of its module."""

    def __init__(self, module: Any) -> None:
        self.plain = module.forward
        self._norm = norm_of(module)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[1, T, H]` to `[1, T, H]`."""
        context = current_context()
        if not isinstance(context, LayerContext):
            return self.plain(hidden_states)  # type: ignore[no-any-return]
        return context.ops.rms_norm(hidden_states[0], self._norm)[None]


class FastLayer:
    """A decoder layer, as the forward pass of its module; `spec` is what its attention asks for."""

    def __init__(self, layer: Any, spec: AttentionSpec, backend: AttentionBackend[Any]) -> None:
        ops = backend.ops
        self.plain = layer.forward
        self._attention = _Attention(layer.self_attn, spec, ops)
        self._mlp = _MLP(layer.mlp, ops)
        self._input_norm = norm_of(layer.input_layernorm)
        self._update_norms: tuple[Norm, Norm] | None = None
        if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma 2 and later
            self._mlp_norm = norm_of(layer.pre_feedforward_layernorm)
            self._update_norms = (
                norm_of(layer.post_attention_layernorm),
                norm_of(layer.post_feedforward_layernorm),
            )
        else:
            self._mlp_norm = norm_of(layer.post_attention_layernorm)
        self.whole = backend.whole_layer(self._parts())
        self.attention = layer.self_attn

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        **options: Any,
    ) -> Tensor:
        """`[1, T, H]` to `[1, T, H]`; of the options, the engine's steps need none."""
        context = current_context()
        if not isinstance(context, LayerContext):
            return self.plain(  # type: ignore[no-any-return]
                hidden_states, position_embeddings=position_embeddings, **options
            )
        ops, hidden = context.ops, hidden_states[0]
        if self.whole is not None:
            cos, sin = position_embeddings
            call = LayersCall([self.attention], [self.whole], hidden, (cos[0], sin[0]))
            return context.run_layers(call)[None]
        normed = ops.rms_norm(hidden, self._input_norm)
        update = self._attention(normed, position_embeddings, context)
        if self._update_norms is None:
            hidden, normed = ops.add_rms_norm(update, hidden, self._mlp_norm)
            return self._mlp.add_to(hidden, normed)[None]
        after_attention, after_mlp = self._update_norms
        update = ops.rms_norm(update, after_attention)
        hidden, normed = ops.add_rms_norm(update, hidden, self._mlp_norm)
        update = ops.rms_norm(self._mlp(normed), after_mlp)
        return hidden.add_(update)[None]

    def _parts(self) -> LayerParts:
        attention, mlp = self._attention, self._mlp
        return LayerParts(
            input_norm=self._input_norm,
            qkv=attention.qkv,
            heads=attention.heads[0],
            kv_heads=attention.heads[-1],
            rotates=attention.rotates,
            head_norms=attention.norms,
            spec=attention.spec,
            out=attention.out,
            mlp_norm=self._mlp_norm,
            gated=mlp.gated,
            down=mlp.down,
            update_norms=self._update_norms,
        )


class _Attention:
    """Queries, keys and values from one product."""

    def __init__(self, attention: Any, spec: AttentionSpec, ops: LayerOps) -> None:
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv = ops.linear(*fuse(projections))
        self.out = linear_of(attention.o_proj, ops)
        self.heads = [linear.out_features // attention.head_dim for linear in projections]
        self.module = attention
        self.spec = spec
        self.rotates = getattr(attention, "use_rope", True)  # SmolLM3 has layers without
        self.norms: tuple[Norm, Norm] | None = None
        if hasattr(attention, "q_norm"):
            self.norms = norm_of(attention.q_norm), norm_of(attention.k_norm)

    def __call__(
        self, normed: Tensor, position_embeddings: tuple[Tensor, Tensor], context: LayerContext
    ) -> Tensor:
        qkv = self.qkv(normed).view(len(normed), sum(self.heads), -1)
        if self.rotates:
            cos, sin = position_embeddings
            rotation = Rotation(cos[0], sin[0], *(self.norms or ()))
            out = context.attend_packed(
                PackedCall(self.module, qkv, self.heads[-1], rotation, self.spec)
            )
        else:
            query, key, value = torch.split(qkv, self.heads, dim=1)
            out = context.attend(
                AttentionCall(self.module, query, key, value, self.spec, options={})
            )
        return self.out(out.flatten(1))


class _MLP:
    """Gate and up from one product, or as the kernels like it."""

    def __init__(self, mlp: Any, ops: LayerOps) -> None:
        weight, _ = fuse([mlp.gate_proj, mlp.up_proj])
        self.gated = ops.gated_linear(weight, ACTIVATIONS[type(mlp.act_fn)])
        self.down = linear_of(mlp.down_proj, ops)

    def __call__(self, normed: Tensor) -> Tensor:
        return self.down(self.gated(normed))

    def add_to(self, hidden: Tensor, normed: Tensor) -> Tensor:
        """Add the update to `hidden`, in the product that gives it."""
        return self.down.add_to(hidden, self.gated(normed))


class FastHead:
    """The product that gives logits, as the forward pass of its module."""

    def __init__(self, head: nn.Linear, ops: LayerOps) -> None:
        self.plain = head.forward
        self._linear = linear_of(head, ops)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[1, T, H]` to `[1, T, V]`."""
        if not isinstance(current_context(), LayerContext):
            return self.plain(hidden_states)
        return self._linear(hidden_states[0])[None]


def norm_of(module: Any) -> Norm:
    """What an RMSNorm computes; Gemma's kind keeps its weight less 1."""
    weight = module.weight.detach()
    if hasattr(module, "variance_epsilon"):
        return Norm(weight, module.variance_epsilon)
    return Norm(1.0 + weight.float(), module.eps)


def linear_of(module: nn.Linear, ops: LayerOps) -> Linear:
    """A module's product as the kernels like it."""
    bias = module.bias
    return ops.linear(module.weight.detach(), None if bias is None else bias.detach())


def free_weights(module: nn.Module, fast: FastLayer | FastHead) -> None:
    """Free the weights of a module's products; from now on it runs as `fast` only.

    Torch would read whatever memory is there for a weight without values, so calls are refused.
    """
    fast.plain = _refuse
    linears: list[Any] = [part for part in module.modules() if isinstance(part, nn.Linear)]
    for linear in linears:
        linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)
        linear.forward = fast.forward if linear is module else _refuse


def _refuse(*args: object, **options: object) -> Any:
    raise RuntimeError("the weights of this layer were freed: it runs in the engine's steps only")


def fuse(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one product for all; the parameters of each become views of them."""
    weight = _join([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return weight, _join(biases) if biases else None


def _join(parameters: Sequence[Tensor]) -> Tensor:
    joined = torch.cat([parameter.data for parameter in parameters])
    sizes = [len(parameter) for parameter in parameters]
    for parameter, part in zip(parameters, torch.split(joined, sizes), strict=True):
        parameter.data = part
    return joined
