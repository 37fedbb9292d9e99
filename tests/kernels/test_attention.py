"""Every backend against the float64 reference, over the same cases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragcache_kernels import BACKENDS, AttentionBackend, AttentionSpec, StepLayout, get_backend
from ragcache_kernels.reference import reference_attention
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> AttentionBackend[Any]:
    return get_backend(request.param)


@dataclass(frozen=True)
class Shape:
    """Head geometry and block size."""

    kv_heads: int = 2
    group: int = 3
    dim: int = 16
    value_dim: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Step:
    """One step's tensors; the caches hold the context, and NaN wherever nothing is stored."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    layout: StepLayout


def make_step(
    shape: Shape,
    lengths: list[tuple[int, int]],
    *,
    shared: int = 0,
    padding: int = 0,
    seed: int = 0,
    permute: bool = True,
) -> Step:
    """Sequences of `(query tokens, context after the step)`.

    The first `shared` tokens, whole blocks before any query, are one run of physical blocks.
    Content depends on (seed, sequence, position) only, wherever the blocks lie.
    """
    size = shape.block_size
    needed = [-(-kv // size) for _, kv in lengths]
    common = shared // size
    total = common + sum(n - common for n in needed) + 3
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed + 1))
    ids = iter((order if permute else torch.arange(total)).tolist())
    head = [next(ids) for _ in range(common)]
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    kv_shape = (total, size, shape.kv_heads)
    key_cache = torch.full((*kv_shape, shape.dim), torch.nan, dtype=shape.dtype)
    value_cache = torch.full((*kv_shape, shape.value_dim), torch.nan, dtype=shape.dtype)
    queries, keys, values, slots = [], [], [], []
    shared_key, shared_value = _content(shape, seed, shared)[1:]
    for s, (q, kv) in enumerate(lengths):
        table[s, : needed[s]] = torch.tensor(head + [next(ids) for _ in range(needed[s] - common)])
        query, key, value = _content(shape, seed + 100 + s, kv)
        key[:shared], value[:shared] = shared_key, shared_value
        positions = torch.arange(kv)
        slot = table[s].long()[positions // size] * size + positions % size
        key_cache.flatten(0, 1)[slot[: kv - q]] = key[: kv - q]
        value_cache.flatten(0, 1)[slot[: kv - q]] = value[: kv - q]
        for out, new in ((queries, query), (keys, key), (values, value), (slots, slot)):
            out.append(new[kv - q :])
    if padding:
        for out, new in zip((queries, keys, values), _content(shape, seed, padding), strict=True):
            out.append(torch.full_like(new, torch.nan))
        slots.append(torch.full((padding,), -1))
    q_len = torch.tensor([0] + [q for q, _ in lengths])
    layout = StepLayout(
        cu_q=q_len.cumsum(0).int(),
        kv_len=torch.tensor([kv for _, kv in lengths], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat(slots),
        block_size=size,
    )
    return Step(
        torch.cat(queries), torch.cat(keys), torch.cat(values), key_cache, value_cache, layout
    )


def _content(shape: Shape, seed: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of `count` tokens."""
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads)
    dims = (shape.dim, shape.dim, shape.value_dim)
    query, key, value = (
        torch.randn(count, h, d, generator=generator).to(shape.dtype)
        for h, d in zip(heads, dims, strict=True)
    )
    return query, key, value


def run(backend: AttentionBackend[Any], step: Step, spec: AttentionSpec) -> Tensor:
    plan = backend.plan(step.layout, CPU)
    backend.write_kv(step.key, step.value, step.key_cache, step.value_cache, plan)
    return backend.attend(step.query, step.key_cache, step.value_cache, plan, spec)


def check(backend: AttentionBackend[Any], step: Step, spec: AttentionSpec) -> None:
    out = run(backend, step, spec)
    count = int(step.layout.cu_q[-1])
    expected = reference_attention(
        step.query, step.key_cache, step.value_cache, step.layout, spec
    )
    assert out.dtype == step.query.dtype
    assert not expected[:count].isnan().any()
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(
        out[:count].double(), expected[:count], rtol=tolerance, atol=tolerance
    )


def spec_for(shape: Shape, **options: Any) -> AttentionSpec:
    return AttentionSpec(scale=shape.dim**-0.5, **options)


def sinks_for(shape: Shape) -> Tensor:
    return torch.linspace(-2, 3, shape.kv_heads * shape.group)


MIXED = [(1, 1), (1, 30), (5, 5), (7, 23), (1, 16), (2, 2), (16, 48), (1, 17), (3, 40)]


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (80, 80), (24, 16)], ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_mixed_step_equals_the_reference(
    backend: AttentionBackend[Any], group: int, dims: tuple[int, int], block_size: int
) -> None:
    shape = Shape(2, group, *dims, block_size)
    check(backend, make_step(shape, MIXED), spec_for(shape))


@pytest.mark.parametrize("window", [None, 1, 3, 4, 16, 17, 40, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("value_dim", [16, 8])
def test_windows_soft_cap_and_sinks_combine(
    backend: AttentionBackend[Any],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    value_dim: int,
) -> None:
    shape = Shape(value_dim=value_dim)
    spec = spec_for(
        shape, window=window, softcap=softcap, sinks=sinks_for(shape) if sinks else None
    )
    check(backend, make_step(shape, MIXED), spec)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 3.0}], ids=str)
def test_half_precision_stays_within_its_rounding(
    backend: AttentionBackend[Any], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    shape = Shape(dtype=dtype)
    check(backend, make_step(shape, MIXED), spec_for(shape, **options, sinks=sinks_for(shape)))
