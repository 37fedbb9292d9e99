"""A whole layer in one call does what its operations do one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from ragcache_kernels import AttentionSpec, LayerCache, StepLayout, get_backend
from ragcache_kernels.interface import LayerParts
from ragcache_kernels.layer_ops import Norm, Rotation
from ragcache_kernels.native.backend import NativeBackend
from ragcache_kernels.native.library import Team, supported_tiers
from ragcache_kernels.tiles import NARROW_SPLIT
from torch import Tensor

HEADS, KV_HEADS, SIZE, GATED, ROTARY = 6, 2, 72, 100, 16
QKV = HEADS + 2 * KV_HEADS
LENGTHS = [(1, 30), (5, 5), (7, 23), (1, 1)]  # query tokens, context after the step
TOKENS = sum(count for count, _ in LENGTHS)


@dataclass(frozen=True)
class Shape:
    """Of a pool's blocks, in activations' dtype."""

    block: int
    dim: int
    dtype: torch.dtype


FLOAT, HALF = Shape(4, 20, torch.float32), Shape(4, 20, torch.bfloat16)
PAIRED = Shape(16, 32, torch.bfloat16)  # with products of bfloat16
SHAPES = pytest.mark.parametrize("shape", [FLOAT, HALF, PAIRED], ids=["float", "half", "paired"])


@pytest.fixture(params=supported_tiers(), scope="module")
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def native(tier: str) -> NativeBackend:
    return NativeBackend(Team(tier, threads=2))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def norm(size: int, dtype: torch.dtype, seed: int = 0) -> Norm:
    return Norm((1 + 0.1 * random(size, seed=seed)).to(dtype), 1e-6)


class Layer:
    """Weights of a layer."""

    def __init__(self, shape: Shape, spec: AttentionSpec) -> None:
        self.dtype, self.dim, self.spec = shape.dtype, shape.dim, spec
        self.rotates, self.normed_heads, self.normed_updates = True, False, False

    def weight(self, out: int, size: int) -> Tensor:
        return (random(out, size) / size**0.5).to(self.dtype)

    def parts(self, backend: NativeBackend) -> LayerParts:
        norms = [norm(SIZE, self.dtype, seed) for seed in range(4)]
        heads = norm(self.dim, torch.float32, 5), norm(self.dim, torch.float32, 6)
        bias = random(QKV * self.dim).to(self.dtype)
        return LayerParts(
            input_norm=norms[0],
            qkv=backend.ops.linear(self.weight(QKV * self.dim, SIZE), bias),
            heads=HEADS,
            kv_heads=KV_HEADS,
            rotates=self.rotates,
            head_norms=heads if self.normed_heads else None,
            spec=self.spec,
            out=backend.ops.linear(self.weight(SIZE, HEADS * self.dim)),
            mlp_norm=norms[1],
            gated=backend.ops.gated_linear(self.weight(2 * GATED, SIZE), "silu"),
            down=backend.ops.linear(self.weight(SIZE, GATED)),
            update_norms=(norms[2], norms[3]) if self.normed_updates else None,
        )


def step_layout(block: int, lengths: list[tuple[int, int]] = LENGTHS) -> StepLayout:
    blocks = [-(-length // block) for _, length in lengths]
    tables = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(1)).split(blocks)
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    slots = []
    for row, own, (count, length) in zip(table, tables, lengths, strict=True):
        row[: len(own)] = own
        positions = torch.arange(length - count, length)
        slots.append(own[positions // block] * block + positions % block)
    return StepLayout(
        cu_q=torch.tensor([0, *(count for count, _ in lengths)]).cumsum(0).int(),
        kv_len=torch.tensor([length for _, length in lengths], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat(slots),
        block_size=block,
    )


def pool(shape: Shape, storage: torch.dtype | None = None, blocks: int = 20) -> LayerCache:
    slots = (blocks, shape.block, KV_HEADS)
    rows = (random(*slots, shape.dim, seed=s) for s in range(2))
    if storage is None:
        return LayerCache(*(each.to(shape.dtype) for each in rows))
    scales = (random(*slots, seed=s).abs() / 40 for s in range(2))
    return LayerCache(*(each.mul(40).to(storage) for each in rows), *scales)


def angles(dtype: torch.dtype, tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor]:
    every = random(tokens, ROTARY, seed=seed)
    return every.cos().to(dtype), every.sin().to(dtype)


def one_by_one(layer: LayerParts, backend, hidden, cos, sin, cache, plan) -> Tensor:
    ops = backend.ops
    qkv = layer.qkv(ops.rms_norm(hidden, layer.input_norm)).view(len(hidden), QKV, -1)
    if layer.rotates:
        rotation = Rotation(cos, sin, *(layer.head_norms or ()))
        query = backend.rotate_and_write(qkv, rotation, cache, plan)
    else:
        query, key, value = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
        backend.write_kv(key, value, cache, plan)
    update = layer.out(backend.attend(query, cache, plan, layer.spec).flatten(1))
    if layer.update_norms is None:
        hidden, normed = ops.add_rms_norm(update, hidden, layer.mlp_norm)
        return layer.down.add_to(hidden, layer.gated(normed))
    attention_norm, update_norm = layer.update_norms
    update = ops.rms_norm(update, attention_norm)
    hidden, normed = ops.add_rms_norm(update, hidden, layer.mlp_norm)
    return hidden + ops.rms_norm(layer.down(layer.gated(normed)), update_norm)


PLAIN = AttentionSpec(scale=0.2)
KINDS = {
    "plain": {},
    "not rotated": {"rotates": False},
    "head norms": {"normed_heads": True},
    "update norms": {"normed_updates": True},
    "window": {"spec": replace(PLAIN, window=9)},
    "softcap": {"spec": replace(PLAIN, softcap=5.0)},
    "sinks": {"spec": replace(PLAIN, sinks=torch.linspace(-1, 2, HEADS))},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", [None, torch.int8], ids=str)
@SHAPES
def test_a_whole_layer_is_what_its_operations_are(native, shape, storage, kind):
    layer = Layer(shape, PLAIN)
    for name, value in KINDS[kind].items():
        setattr(layer, name, value)
    parts = layer.parts(native)
    whole = native.whole_layer(parts)
    caches = [pool(shape, storage) for _ in range(2)]
    cos, sin = angles(shape.dtype)
    layout = step_layout(shape.block)
    for step in range(2):  # the second one with what was put together for the first
        hidden = random(TOKENS, SIZE, seed=step).to(shape.dtype)
        before = hidden.clone()
        plan = native.plan(layout, hidden.device)
        out = native.run_layers([whole], hidden, (cos, sin), caches[:1], plan)
        assert torch.equal(hidden, before)
        plan = native.plan(layout, hidden.device)
        expected = one_by_one(parts, native, hidden, cos, sin, caches[1], plan)
        assert torch.equal(out, expected)
        for mine, other in zip(*(cache.tensors for cache in caches), strict=True):
            assert torch.equal(mine, other)
    assert out.isfinite().all()


def test_layers_that_differ_share_a_step(native):
    plan = native.plan(step_layout(FLOAT.block), torch.device("cpu"))
    hidden = random(TOKENS, SIZE)
    rotations = [angles(FLOAT.dtype, seed=s) for s in range(2)]
    every = [(k, each) for k in ("plain", "window", "sinks") for each in rotations]
    outs, expected = [], []
    for kind, rotation in every:
        parts = Layer(FLOAT, KINDS[kind].get("spec", PLAIN)).parts(native)
        whole = native.whole_layer(parts)
        outs.append(native.run_layers([whole], hidden, rotation, [pool(FLOAT)], plan))
        expected.append(one_by_one(parts, native, hidden, *rotation, pool(FLOAT), plan))
    assert all(map(torch.equal, outs, expected))
    assert not any(torch.equal(a, b) for a, b in pairwise(outs))


@SHAPES
def test_layers_that_follow_each_other_are_what_each_alone_is(native, shape):
    layout, hidden = step_layout(shape.block), random(TOKENS, SIZE).to(shape.dtype)
    rotation = angles(shape.dtype)
    parts = [Layer(shape, KINDS[kind].get("spec", PLAIN)).parts(native) for kind in KINDS]
    layers = [native.whole_layer(part) for part in parts]
    caches = [[pool(shape) for _ in layers] for _ in range(2)]
    plan = native.plan(layout, hidden.device)
    out = native.run_layers(layers, hidden, rotation, caches[0], plan)
    for layer, cache in zip(layers, caches[1], strict=True):
        hidden = native.run_layers([layer], hidden, rotation, [cache], plan)
    assert torch.equal(out, hidden)
    for one, other in zip(*caches, strict=True):
        assert torch.equal(one.key, other.key)


@SHAPES
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("keep", [[], [1, 70], [69, 70, 99, 100, 120]], ids=str)
def test_rows_that_are_kept_are_what_they_are_among_all(native, shape, keep, count):
    sequences = [(1, 40), (1, 1), (69, 100), (30, 30), (20, NARROW_SPLIT + 40)]
    keep = torch.tensor(keep, dtype=torch.int64)
    layout = step_layout(shape.block, sequences)
    tokens = sum(new for new, _ in sequences)
    hidden, rotation = random(tokens, SIZE).to(shape.dtype), angles(shape.dtype, tokens=tokens)
    layer = Layer(shape, PLAIN)
    layer.normed_updates = count > 1
    layers = [native.whole_layer(layer.parts(native)) for _ in range(count)]
    blocks = int(layout.block_table.max()) + 1
    caches = [[pool(shape, blocks=blocks) for _ in layers] for _ in range(2)]
    all_rows, some = (
        native.run_layers(layers, hidden, rotation, own, native.plan(layout, hidden.device), rows)
        for own, rows in zip(caches, (None, keep), strict=True)
    )
    assert torch.equal(some, all_rows[keep])
    for one, other in zip(*caches, strict=True):
        assert torch.equal(one.key, other.key)


def test_a_layer_keeps_its_memory_when_one_of_another_kind_takes_more(tier):
    backend = NativeBackend(Team(tier, threads=1))  # which has taken none yet
    layout = step_layout(FLOAT.block, [(1, 2 * NARROW_SPLIT)])
    plan = backend.plan(layout, torch.device("cpu"))
    rows = random(len(layout.block_table[0]), FLOAT.block, KV_HEADS, FLOAT.dim)
    caches = [LayerCache(rows.clone(), rows.clone()) for _ in range(2)]
    parts = [Layer(FLOAT, replace(PLAIN, window=n)).parts(backend) for n in (9, None)]
    layers = [backend.whole_layer(part) for part in parts]
    backend.run_layers(layers, random(1, SIZE), angles(FLOAT.dtype, tokens=1), caches, plan)
    works = [(step.contents.work, kept) for step, kept in plan.steps.values()]
    assert len({work.sums for work, _ in works}) == 2
    for work, kept in works:
        addresses = {tensor.data_ptr() for tensor in kept}
        assert {work.sums, work.tops, work.totals, work.scratch} <= addresses


def test_what_is_no_whole_layer_is_run_operation_by_operation(native):
    parts = Layer(FLOAT, PLAIN).parts(native)
    other = get_backend("torch").ops.linear(torch.zeros(SIZE, HEADS * FLOAT.dim))
    assert native.whole_layer(replace(parts, out=other)) is None
    assert get_backend("torch").whole_layer(parts) is None


def test_hidden_states_of_another_kind_are_refused(native):
    whole = native.whole_layer(Layer(FLOAT, PLAIN).parts(native))
    plan = native.plan(step_layout(FLOAT.block), torch.device("cpu"))
    cos, sin = angles(FLOAT.dtype)
    cache = pool(FLOAT)
    for hidden in (random(TOKENS, SIZE).bfloat16(), random(TOKENS, SIZE + 1)):
        with pytest.raises(TypeError, match="for a layer in"):
            native.run_layers([whole], hidden, (cos, sin), [cache], plan)
    with pytest.raises(TypeError, match="cosines"):
        native.run_layers([whole], random(TOKENS, SIZE), (cos.bfloat16(), sin), [cache], plan)
