"""Every backend against the float64 reference, over the same cases; on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragcache_kernels import AttentionBackend, AttentionSpec, LayerCache, StepLayout
from ragcache_kernels import planner as planner_module
from ragcache_kernels import tiles as tiles_module
from ragcache_kernels import torch_stack as torch_stack_module
from ragcache_kernels.planner import SharingCost
from ragcache_kernels.quantise import LIMITS, as_integers, quantise, quantised_dtypes
from ragcache_kernels.reference import reference_attention
from torch import Tensor

Backend = AttentionBackend[Any]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# (query tokens, context after the step): decodes, chunks with and without a prefix, fresh prompts
MIXED = [(1, 1), (1, 30), (5, 5), (7, 23), (1, 16), (2, 2), (16, 48), (1, 17), (3, 40)]
# Of the cache; None: that of the queries.
STORAGES = [None, *quantised_dtypes(DEVICE)]
every_storage = pytest.mark.parametrize("storage", STORAGES, ids=str)


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 2
    group: int = 3
    dim: int = 16
    value_dim: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    storage: torch.dtype | None = None

    def spec(self, **options: Any) -> AttentionSpec:
        return AttentionSpec(scale=self.dim**-0.5, **options)

    def sinks(self) -> Tensor:
        return torch.linspace(-2, 3, self.kv_heads * self.group)

    def tokens(self, seed: int, count: int) -> list[Tensor]:
        """Query, key and value of `count` tokens; the first n do not depend on `count`."""
        heads = (self.kv_heads * self.group, self.kv_heads, self.kv_heads)
        dims = (self.dim, self.dim, self.value_dim)
        return [
            torch.randn(count, h, d, generator=torch.Generator().manual_seed(seed + i)).to(
                self.dtype
            )
            for i, (h, d) in enumerate(zip(heads, dims, strict=True))
        ]

    def cache(self, blocks: int) -> LayerCache:
        """Full of NaN; where there is none in int8, of anything, with scales of NaN."""
        shape = (blocks, self.block_size, self.kv_heads)
        storage, dims = self.storage or self.dtype, (self.dim, self.value_dim)
        if self.storage is None:
            return LayerCache(*(torch.full((*shape, d), torch.nan, dtype=storage) for d in dims))
        rows = (torch.full((*shape, d), -1, dtype=torch.int8).view(storage) for d in dims)
        return LayerCache(*rows, *(torch.full(shape, torch.nan) for _ in dims))

    def stored(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """What the tensors of a cache hold of keys and values."""
        if self.storage is None:
            return [key, value]
        rows, scales = zip(*(quantise(each, self.storage) for each in (key, value)), strict=True)
        return [*rows, *scales]


@dataclass(frozen=True)
class Step:
    query: Tensor
    key: Tensor
    value: Tensor
    cache: LayerCache
    layout: StepLayout


def make_step(
    shape: Shape,
    lengths: Sequence[tuple[int, int]],
    *,
    shared: int = 0,
    padding: int = 0,
    placement: int = 0,
    first: int = 0,
) -> Step:
    """Caches that hold the context of each sequence, and NaN wherever nothing is stored yet.

    What a token holds depends on the number of its sequence, counted from `first`, and on its
    position. The first `shared` tokens, whole blocks before any query, lie in the same physical
    blocks for all. `placement` seeds the choice of physical blocks.
    """
    size, common = shape.block_size, shared // shape.block_size
    needed = [-(-kv // size) for _, kv in lengths]
    total = common + sum(n - common for n in needed) + 3
    ids = torch.randperm(total, generator=torch.Generator().manual_seed(placement)).tolist()
    head, ids = ids[:common], ids[common:]
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    cache = shape.cache(total)
    step: list[list[Tensor]] = [[], [], [], []]
    for s, (q, kv) in enumerate(lengths):
        own, ids = ids[: needed[s] - common], ids[needed[s] - common :]
        table[s, : needed[s]] = torch.tensor(head + own)
        tokens = shape.tokens(1000 * (first + s + 1), kv)
        for mine, everyones in zip(tokens[1:], shape.tokens(0, shared)[1:], strict=True):
            mine[:shared] = everyones
        slots = (table[s].long()[:, None] * size + torch.arange(size)).flatten()[:kv]
        for tensor, content in zip(cache.tensors, shape.stored(*tokens[1:]), strict=True):
            as_integers(tensor).flatten(0, 1)[slots[: kv - q]] = as_integers(content)[: kv - q]
        for part, new in zip(step, (*tokens, slots), strict=True):
            part.append(new[kv - q :])
    if padding:
        for part, new in zip(step, shape.tokens(0, padding), strict=False):
            part.append(torch.full_like(new, torch.nan))
        step[3].append(torch.full((padding,), -1))
    query, key, value, slot_mapping = (torch.cat(part) for part in step)
    layout = StepLayout(
        cu_q=torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int(),
        kv_len=torch.tensor([kv for _, kv in lengths], dtype=torch.int32),
        block_table=table,
        slot_mapping=slot_mapping,
        block_size=size,
    )
    return Step(query, key, value, cache, layout)


def attend(backend: Backend, step: Step, spec: AttentionSpec) -> Tensor:
    """What the engine does in one layer; the step's caches receive the new keys and values."""
    if spec.sinks is not None:
        spec = replace(spec, sinks=spec.sinks.to(DEVICE))
    dtype = step.query.dtype
    cache = backend.laid_out(on_device(step.cache), dtype)
    plan = backend.plan(step.layout, DEVICE)
    backend.write_kv(step.key.to(DEVICE), step.value.to(DEVICE), cache, plan)
    out = backend.attend(step.query.to(DEVICE), cache, plan, spec)
    written = backend.in_order(cache, dtype)
    for tensor, other in zip(step.cache.tensors, written.tensors, strict=True):
        if tensor.data_ptr() != other.data_ptr():
            tensor.copy_(other)
    return out.cpu()


def on_device(cache: LayerCache) -> LayerCache:
    return LayerCache(*(tensor.to(DEVICE) for tensor in cache.tensors))


def check(backend: Backend, step: Step, spec: AttentionSpec) -> None:
    out = attend(backend, step, spec)
    expected = reference_attention(step.query, step.cache, step.layout, spec)
    assert not expected.isnan().any()
    assert out.dtype == step.query.dtype
    close(out.double(), expected, TOLERANCE[out.dtype])


def close(one: Tensor, other: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("group", "dim", "block_size"),
    [
        (1, 64, 1),
        (3, 64, 16),
        (4, 80, 16),
        (5, 96, 32),
        (8, 128, 16),
        (2, 256, 32),
        (24, 64, 16),
        (80, 256, 16),
    ],
)
@every_storage
def test_the_shapes_of_real_models_equal_the_reference(
    backend: Backend, group: int, dim: int, block_size: int, storage: torch.dtype | None
) -> None:
    shape = Shape(2, group, dim, dim, block_size, storage=storage)
    check(backend, make_step(shape, MIXED), shape.spec())


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (80, 80), (24, 16)], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_a_mixed_step_equals_the_reference(
    backend: Backend, group: int, dims: tuple[int, int], block_size: int
) -> None:
    shape = Shape(2, group, *dims, block_size)
    check(backend, make_step(shape, MIXED), shape.spec())


@pytest.mark.parametrize("value_dim", [16, 8])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 16, 17, 40, 100])
def test_windows_soft_cap_and_sinks_combine(
    backend: Backend,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    value_dim: int,
) -> None:
    shape = Shape(value_dim=value_dim)
    spec = shape.spec(window=window, softcap=softcap, sinks=shape.sinks() if sinks else None)
    check(backend, make_step(shape, MIXED), spec)


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_storage
def test_half_precision_stays_within_its_rounding(
    backend: Backend, dtype: torch.dtype, options: dict[str, Any], storage: torch.dtype | None
) -> None:
    shape = Shape(dtype=dtype, storage=storage)
    check(backend, make_step(shape, MIXED), shape.spec(**options, sinks=shape.sinks()))


@pytest.mark.parametrize(
    "lengths", [[(1, 2500)], [(1, 2500), (600, 1700)], [(1100, 1100)]], ids=str
)
@pytest.mark.parametrize("options", [{}, {"window": 700}, {"softcap": 3.0}], ids=str)
def test_long_contexts_are_cut_and_merged(
    backend: Backend, lengths: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    shape = Shape(1, 2, block_size=16)
    check(backend, make_step(shape, lengths), shape.spec(**options))


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"softcap": 3.0}], ids=str)
@every_storage
def test_decodes_that_share_a_prefix_equal_the_reference(
    backend: Backend, options: dict[str, Any], storage: torch.dtype | None
) -> None:
    shape = Shape(storage=storage)
    lengths = [(1, 313 + 5 * i) for i in range(5)] + [(6, 330)]
    step = make_step(shape, lengths, shared=308)
    check(backend, step, shape.spec(**options, sinks=shape.sinks()))


@every_storage
def test_sharing_physical_blocks_changes_nothing(
    backend: Backend, storage: torch.dtype | None
) -> None:
    shape, spec = Shape(storage=storage), Shape().spec()
    lengths = [(1, 301), (1, 318), (1, 340)]
    together = make_step(shape, lengths, shared=300)
    alone = [make_step(shape, [one], shared=300, first=s) for s, one in enumerate(lengths)]
    close(attend(backend, together, spec), torch.cat([attend(backend, s, spec) for s in alone]))


@every_storage
def test_padding_rows_are_skipped_and_come_back_as_zero(
    backend: Backend, storage: torch.dtype | None
) -> None:
    shape = Shape(storage=storage)
    step = make_step(shape, MIXED, padding=5)
    plain = make_step(shape, MIXED)
    for spec in (shape.spec(), shape.spec(window=7, sinks=shape.sinks())):
        out = attend(backend, step, spec)
        close(out[:-5], attend(backend, plain, spec))
        assert (out[-5:] == 0).all()
    for tensor, untouched in zip(step.cache.tensors, plain.cache.tensors, strict=True):
        assert torch.equal(tensor.view(torch.uint8), untouched.view(torch.uint8))


@every_storage
def test_memory_that_nobody_wrote_never_reaches_an_output(
    backend: Backend, storage: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_of_nan(like: Tensor, *shape: int, **options: Any) -> Tensor:
        is_float = options.get("dtype", like.dtype).is_floating_point
        return like.new_full(shape, torch.nan if is_float else -1, **options)

    monkeypatch.setattr(Tensor, "new_empty", full_of_nan)
    shape = Shape(storage=storage)
    for spec in (shape.spec(), shape.spec(window=3, sinks=shape.sinks())):
        out = attend(backend, make_step(shape, MIXED, padding=2), spec)
        assert not out.isnan().any()


@every_storage
def test_blocks_behind_two_billion_elements_are_found(
    backend: Backend, storage: torch.dtype | None
) -> None:
    shape = Shape(1, 2, dtype=torch.bfloat16, block_size=16, storage=storage)
    first = 2**31 // (16 * 16) + 20
    step = make_step(shape, [(1, 40), (5, 21)])
    caches, near = [], []
    for tensor in backend.laid_out(on_device(step.cache), shape.dtype).tensors:
        # Untouched, so the memory in front is not there.
        cache = tensor.new_empty(first + len(tensor), *tensor.shape[1:])
        cache[first:] = tensor
        caches.append(cache)
        near.append(cache[first:])
    layout = replace(
        step.layout,
        block_table=step.layout.block_table + first,
        slot_mapping=step.layout.slot_mapping + first * 16,
    )
    plan, cache = backend.plan(layout, DEVICE), LayerCache(*caches)
    backend.write_kv(step.key.to(DEVICE), step.value.to(DEVICE), cache, plan)
    out = backend.attend(step.query.to(DEVICE), cache, plan, shape.spec()).cpu()
    stored = on_device(backend.in_order(LayerCache(*near), shape.dtype))
    expected = reference_attention(step.query, stored, step.layout, shape.spec())
    close(out.double(), expected, TOLERANCE[shape.dtype])


@every_storage
def test_where_the_blocks_lie_changes_nothing(
    backend: Backend, storage: torch.dtype | None
) -> None:
    shape = Shape(storage=storage)
    one, other = (
        attend(backend, make_step(shape, MIXED, placement=p), shape.spec()) for p in (1, 2)
    )
    assert torch.equal(one, other)


@every_storage
def test_a_sequence_does_not_depend_on_the_rest_of_the_batch(
    backend: Backend, storage: torch.dtype | None
) -> None:
    shape = Shape(storage=storage)
    for spec in (shape.spec(), shape.spec(window=21)):
        together = attend(backend, make_step(shape, MIXED), spec)
        alone = [
            attend(backend, make_step(shape, [one], first=s), spec) for s, one in enumerate(MIXED)
        ]
        close(together, torch.cat(alone))


@pytest.mark.parametrize("options", [{}, {"window": 11}], ids=str)
@every_storage
def test_a_prompt_in_chunks_equals_the_whole_prompt(
    backend: Backend, options: dict[str, Any], storage: torch.dtype | None
) -> None:
    shape, spec = Shape(storage=storage), Shape().spec(**options)
    whole = attend(backend, make_step(shape, [(45, 45)]), spec)
    step = make_step(shape, [(45, 45)])
    outs = [
        attend(backend, chunk_of(step, start, stop), spec)
        for start, stop in pairwise([0, 17, 18, 38, 45])
    ]
    close(torch.cat(outs), whole)


def chunk_of(step: Step, start: int, stop: int) -> Step:
    """A part of a step with one prompt, over the same cache."""
    layout = replace(
        step.layout,
        cu_q=torch.tensor([0, stop - start], dtype=torch.int32),
        kv_len=torch.tensor([stop], dtype=torch.int32),
        slot_mapping=step.layout.slot_mapping[start:stop],
    )
    query, key, value = (part[start:stop] for part in (step.query, step.key, step.value))
    return Step(query, key, value, step.cache, layout)


def test_one_plan_serves_layers_of_different_windows_and_shapes(backend: Backend) -> None:
    plan = backend.plan(make_step(Shape(), MIXED).layout, DEVICE)
    shapes = Shape(), Shape(kv_heads=1, dim=24, value_dim=24), Shape(storage=torch.int8), Shape()
    for shape in shapes:
        for spec in (shape.spec(), shape.spec(window=5), shape.spec(softcap=1.0)):
            step = make_step(shape, MIXED)
            cache = on_device(step.cache)
            backend.write_kv(step.key.to(DEVICE), step.value.to(DEVICE), cache, plan)
            out = backend.attend(step.query.to(DEVICE), cache, plan, spec).cpu()
            stored = LayerCache(*(tensor.cpu() for tensor in cache.tensors))
            close(out.double(), reference_attention(step.query, stored, step.layout, spec))


@st.composite
def long_sequences(draw: st.DrawFn) -> list[tuple[int, int]]:
    contexts = draw(st.lists(st.integers(3, 150), min_size=1, max_size=4))
    return [(draw(st.sampled_from([1, 1, 2, 7, 40])), kv) for kv in contexts]


def test_any_step_in_bfloat16_equals_the_reference(backend: Backend) -> None:
    if backend.name == "triton":
        pytest.skip("the interpreter takes a thousand times as long")

    @given(
        lengths=long_sequences(),
        window=st.none() | st.integers(1, 160),
        block_size=st.sampled_from([8, 16, 32, 48]),
        dims=st.sampled_from([(16, 16), (64, 64), (80, 32), (48, 20), (7, 16), (128, 96)]),
        heads=st.sampled_from([(1, 1), (2, 3), (3, 1), (1, 8)]),
        storage=st.sampled_from(STORAGES),
    )
    @settings(max_examples=150, deadline=None)
    def check_one(
        lengths: list[tuple[int, int]],
        window: int | None,
        block_size: int,
        dims: tuple[int, int],
        heads: tuple[int, int],
        storage: torch.dtype | None,
    ) -> None:
        lengths = [(min(queries, kv), kv) for queries, kv in lengths]
        shape = Shape(
            *heads,
            dim=dims[0],
            value_dim=dims[1],
            dtype=torch.bfloat16,
            block_size=block_size,
            storage=storage,
        )
        check(backend, make_step(shape, lengths), shape.spec(window=window))

    check_one()


@pytest.mark.parametrize("block_size", [16, 64])
def test_blocks_that_sequences_share_are_read_in_bfloat16(
    backend: Backend, block_size: int
) -> None:
    shape = Shape(3, 3, dim=64, value_dim=64, dtype=torch.bfloat16, block_size=block_size)
    lengths = [(1, 700), (1, 641), (1, 668), (5, 650), (1, 900)]
    if backend.name == "triton":
        lengths = [(1, 140), (1, 129), (3, 150)]
    shared = lengths[1][1] // block_size * block_size - block_size
    check(backend, make_step(shape, lengths, shared=shared), shape.spec())


def test_copying_blocks_reads_all_sources_before_it_writes(backend: Backend) -> None:
    caches = [torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 5), torch.randn(6, 4, 2)]
    caches += [cache.to(torch.float8_e4m3fn) for cache in caches]
    expected = [cache.clone() for cache in caches]
    for cache, before in zip(expected, caches, strict=True):
        cache[3], cache[4], cache[0] = before[1], before[3], before[4]
    moved = [cache.to(DEVICE) for cache in caches]
    backend.copy_blocks(moved, [(1, 3), (3, 4), (4, 0)])
    for cache, right in zip(moved, expected, strict=True):
        assert torch.equal(as_integers(cache.cpu()), as_integers(right))


# Where a mantissa rounds up to the next power of two, the interpreter loses the carry.
LOST = {("triton", torch.float8_e4m3fn): 0.06 if DEVICE.type == "cpu" else 0.0}


@pytest.mark.parametrize("storage", STORAGES[1:], ids=str)
def test_what_is_quantised_is_off_by_half_a_step_at_most(
    backend: Backend, storage: torch.dtype
) -> None:
    shape = Shape(kv_heads=3, dim=64, value_dim=24, storage=storage)
    step = make_step(shape, [(40, 40)])
    step.key[3] = 0.0
    step.key[4] = 1e-38
    step.key[5] *= 1e4
    step.value[6] *= 1e-6
    attend(backend, step, shape.spec())
    slots = step.layout.slot_mapping
    for rows, cache, scale in zip(
        (step.key, step.value), step.cache.tensors[:2], step.cache.tensors[2:], strict=True
    ):
        scale = scale.flatten(0, 1)[slots].unsqueeze(-1)
        largest = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        torch.testing.assert_close(scale, largest / LIMITS[storage], rtol=1e-6, atol=0.0)
        stored = as_integers(cache).flatten(0, 1)[slots].view(storage).float()
        # Integers are a step apart; float8 e4m3 has three bits of mantissa, and subnormals.
        half_a_step = scale / 2 if storage is torch.int8 else rows.abs() / 16 + scale * 2**-10
        off = (stored * scale - rows).abs() > half_a_step * (1 + 1e-4)
        assert off.float().mean() <= LOST.get((backend.name, storage), 0.0)
    assert (as_integers(step.cache.key).flatten(0, 1)[slots[3]] == 0).all()


# Outputs are around 0.25, of values around 1; they were seen to move by half as much.
QUANTISING = {torch.int8: 0.02, torch.float8_e4m3fn: 0.12}


@pytest.mark.parametrize("storage", STORAGES[1:], ids=str)
def test_quantising_moves_an_output_by_a_small_bounded_amount(
    backend: Backend, storage: torch.dtype
) -> None:
    lengths = [(1, 30), (1, 40), (1, 200)]
    exact = attend(backend, make_step(Shape(dim=64, value_dim=64), lengths), Shape(dim=64).spec())
    shape = Shape(dim=64, value_dim=64, storage=storage)
    error = (attend(backend, make_step(shape, lengths), shape.spec()) - exact).abs().max()
    assert 1e-4 < error < QUANTISING[storage]


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[int, int]]:
    contexts = draw(st.lists(st.integers(8, 40), min_size=1, max_size=6))
    return [(draw(st.sampled_from([1, 1, 1, 2, 3, kv - 4])), kv) for kv in contexts]


# The interpreter takes a thousand times as long.
EXAMPLES = {"torch": 150, "triton": 40, "native": 150}


def test_any_small_step_equals_the_reference_however_it_is_cut(backend: Backend) -> None:
    @given(
        lengths=sequences(),
        shared=st.sampled_from([0, 4]),
        window=st.none() | st.integers(1, 45),
        softcap=st.none() | st.just(2.0),
        sinks=st.booleans(),
        block_size=st.sampled_from([1, 2, 4]),
        storage=st.sampled_from(STORAGES),
        limits=st.tuples(st.integers(2, 12), st.integers(5, 40), st.integers(1, 20)),
    )
    @settings(max_examples=EXAMPLES[backend.name], deadline=None)
    def check_one(
        lengths: list[tuple[int, int]],
        shared: int,
        window: int | None,
        softcap: float | None,
        sinks: bool,
        block_size: int,
        storage: torch.dtype | None,
        limits: tuple[int, int, int],
    ) -> None:
        shape = Shape(block_size=block_size, storage=storage)
        spec = shape.spec(window=window, softcap=softcap, sinks=shape.sinks() if sinks else None)
        queries, keys, shared_keys = limits
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner_module, "MAX_QUERIES", queries)
            patch.setattr(
                SharingCost, "is_worth", lambda _, n, __, keys: (n - 1) * keys >= shared_keys
            )
            patch.setattr(torch_stack_module, "CPU_KEYS_PER_THREAD", max(keys, queries))
            patch.setattr(tiles_module, "NARROW_SPLIT", keys)
            patch.setattr(tiles_module, "WIDE_SPLIT", keys)
            check(backend, make_step(shape, lengths, shared=shared), spec)

    check_one()
