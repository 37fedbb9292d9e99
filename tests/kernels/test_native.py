"""What the C kernels promise beyond being right: not a bit depends on how the work is cut."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragcache_kernels import AttentionSpec, LayerCache, StepLayout
from ragcache_kernels.layer_ops import Norm, Rotation
from ragcache_kernels.native.backend import NativeBackend
from ragcache_kernels.native.library import Team, supported_tiers
from ragcache_kernels.quantise import quantise
from ragcache_kernels.reference import reference_attention
from ragcache_kernels.torch_backend import TorchBackend
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

CPU, SIZE, HEADS, KV_HEADS, DIM = torch.device("cpu"), 16, 6, 2, 64
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(params=supported_tiers(), scope="module")
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def team(tier: str) -> Team:
    return Team(tier, threads=1)


@pytest.fixture(scope="module")
def native(team: Team) -> NativeBackend:
    return NativeBackend(team)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Prompts:
    """Sequences of random tokens; what a step computes of them is up to a test."""

    def __init__(self, lengths: list[int], dtype: torch.dtype) -> None:
        blocks = [-(-length // SIZE) for length in lengths]
        ids = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(9)).int()
        self._tables = ids.split(blocks)
        self._lengths = lengths
        self._parts = [
            [random(n, h, DIM, seed=10 * s + h, dtype=dtype) for h in (HEADS, KV_HEADS, KV_HEADS)]
            for s, n in enumerate(lengths)
        ]
        pools = (torch.zeros(len(ids), SIZE, KV_HEADS, DIM, dtype=dtype) for _ in range(2))
        self._cache = LayerCache(*pools)

    def step(
        self, backend: NativeBackend, spans: dict[int, tuple[int, int]], spec: AttentionSpec
    ) -> list[Tensor]:
        """Outputs of the tokens [start, stop) of sequences, computed in one step."""
        tables = [self._tables[s] for s in spans]
        slots = [
            table.long()[torch.arange(*span) // SIZE] * SIZE + torch.arange(*span) % SIZE
            for table, span in zip(tables, spans.values(), strict=True)
        ]
        layout = StepLayout(
            cu_q=torch.tensor([0, *(b - a for a, b in spans.values())]).cumsum(0).int(),
            kv_len=torch.tensor([b for _, b in spans.values()], dtype=torch.int32),
            block_table=pad_sequence(tables, batch_first=True),
            slot_mapping=torch.cat(slots),
            block_size=SIZE,
        )
        query, key, value = (
            torch.cat([self._parts[s][i][a:b] for s, (a, b) in spans.items()]) for i in range(3)
        )
        plan = backend.plan(layout, CPU)
        backend.write_kv(key, value, self._cache, plan)
        out = backend.attend(query, self._cache, plan, spec)
        return list(out.split([b - a for a, b in spans.values()]))


SPEC = AttentionSpec(scale=DIM**-0.5)


@DTYPES
@pytest.mark.parametrize("options", [{}, {"window": 300}, {"softcap": 5.0}], ids=str)
def test_a_prompt_in_chunks_and_as_single_tokens_gives_the_same_bits(
    native: NativeBackend, dtype: torch.dtype, options: dict[str, float]
) -> None:
    prompts, spec = Prompts([1100], dtype), replace(SPEC, **options)
    (whole,) = prompts.step(native, {0: (0, 1100)}, spec)
    for a, b in pairwise([0, 700, 701, 1030, 1035, 1099, 1100]):
        (chunk,) = prompts.step(native, {0: (a, b)}, spec)
        assert torch.equal(chunk, whole[a:b])


@DTYPES
def test_a_sequence_has_the_same_bits_in_every_batch(
    native: NativeBackend, dtype: torch.dtype
) -> None:
    prompts = Prompts([700, 520, 40], dtype)
    spans = {0: (699, 700), 1: (100, 520), 2: (38, 40)}
    for s, span in ((0, (0, 699)), (1, (0, 100)), (2, (0, 38))):
        prompts.step(native, {s: span}, SPEC)
    together = prompts.step(native, spans, SPEC)
    for (s, span), out in zip(spans.items(), together, strict=True):
        assert torch.equal(prompts.step(native, {s: span}, SPEC)[0], out)


@DTYPES
@pytest.mark.parametrize("count", [4, 70])
@pytest.mark.parametrize("queries", [1, 3])
def test_sharing_blocks_changes_no_bit(
    native: NativeBackend, dtype: torch.dtype, queries: int, count: int
) -> None:
    """All share 700 keys, those of either half 1,100; each has some of its own."""
    shared = torch.arange(700 // SIZE).repeat(count, 1)
    half = (torch.arange(count) % 2)[:, None] * 1000 + 200 + torch.arange(400 // SIZE)
    own = torch.arange(count)[:, None] * 5 + 3000 + torch.arange(5)
    table = torch.cat([shared, half, own], dim=1).int()
    pools = [random(3400, SIZE, KV_HEADS, DIM, seed=seed, dtype=dtype) for seed in (1, 2)]
    cache = native.laid_out(LayerCache(*pools), dtype)
    query = random(count, queries, HEADS, DIM, seed=3, dtype=dtype)
    lengths = table.shape[1] * SIZE - torch.arange(count, dtype=torch.int32) % 7

    def attend(rows: slice) -> Tensor:
        some = query[rows].flatten(0, 1)
        layout = StepLayout(
            cu_q=torch.arange(0, len(some) + 1, queries, dtype=torch.int32),
            kv_len=lengths[rows],
            block_table=table[rows],
            slot_mapping=torch.full((len(some),), -1),
            block_size=SIZE,
        )
        return native.attend(some, cache, native.plan(layout, CPU), SPEC)

    alone = torch.cat([attend(slice(i, i + 1)) for i in range(count)])
    assert torch.equal(attend(slice(count)), alone)


@DTYPES
def test_the_number_of_threads_changes_no_bit(
    native: NativeBackend, tier: str, dtype: torch.dtype
) -> None:
    spans = {0: (0, 600), 1: (0, 90)}
    hidden, update = (random(33, 576, seed=i, dtype=dtype) for i in range(2))
    norm = Norm(random(576, seed=2, dtype=dtype), 1e-5)
    several = NativeBackend(Team(tier, threads=3))
    found = [
        (
            *Prompts([600, 90], dtype).step(each, spans, SPEC),
            *each.ops.add_rms_norm(update, hidden, norm),
        )
        for each in (native, several)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 150)), min_size=1, max_size=3),
    dims=st.tuples(st.integers(1, 256), st.integers(1, 256)),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 9)),
    block_size=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    storage=st.sampled_from([None, torch.int8, torch.float8_e4m3fn]),
    window=st.none() | st.integers(1, 120),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_any_shapes_and_tables_equal_the_reference(
    team: Team,
    lengths: list[tuple[int, int]],
    dims: tuple[int, int],
    heads: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    storage: torch.dtype | None,
    window: int | None,
    seed: int,
) -> None:
    """Pools, tables and scratch memory have no element to spare: what lies behind is not ours."""
    fresh = NativeBackend(team)
    kv_heads, group = heads
    blocks = [-(-(new + before) // block_size) for new, before in lengths]
    ids = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(seed)).int()
    tables = ids.split(blocks)
    kv_len = [new + before for new, before in lengths]
    positions = [torch.arange(before, new + before) for new, before in lengths]
    layout = StepLayout(
        cu_q=torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).int(),
        kv_len=torch.tensor(kv_len, dtype=torch.int32),
        block_table=pad_sequence(tables, batch_first=True),
        slot_mapping=torch.cat(
            [
                t.long()[p // block_size] * block_size + p % block_size
                for t, p in zip(tables, positions, strict=True)
            ]
        ),
        block_size=block_size,
    )
    stored = [random(len(ids), block_size, kv_heads, d, seed=d, dtype=dtype) for d in dims]
    scales: list[Tensor] = []
    if storage is not None:
        stored, scales = map(list, zip(*(quantise(rows, storage) for rows in stored), strict=True))
    cache, spec = LayerCache(*stored, *scales), AttentionSpec(scale=0.2, window=window)
    cache = fresh.laid_out(cache, dtype)
    plan = fresh.plan(layout, CPU)
    tokens = len(layout.slot_mapping)
    new = (random(tokens, kv_heads, d, seed=seed, dtype=dtype) for d in dims)
    fresh.write_kv(*new, cache, plan)
    query = random(tokens, kv_heads * group, dims[0], seed=seed + 1, dtype=dtype)
    out = fresh.attend(query, cache, plan, spec)
    expected = reference_attention(query, fresh.in_order(cache, dtype), layout, spec)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 300)),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    half=st.integers(1, 128),
    rest=st.integers(0, 64),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    normed=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_norms_and_rotations_equal_those_of_torch(
    native: NativeBackend,
    sizes: tuple[int, int],
    heads: tuple[int, int],
    half: int,
    rest: int,
    dtype: torch.dtype,
    normed: bool,
) -> None:
    (tokens, size), (kv_heads, group), tolerance = sizes, heads, {"rtol": 2e-2, "atol": 2e-2}
    plain, dim = TorchBackend(), min(2 * half + rest, 256)
    hidden, update = (random(tokens, size, seed=i, dtype=dtype) for i in range(2))
    norm = Norm(random(size, seed=2, dtype=dtype), 1e-5)
    found = native.ops.add_rms_norm(update, hidden, norm)
    expected = plain.ops.add_rms_norm(update, hidden, norm)
    torch.testing.assert_close(found, expected, **tolerance)
    head_norms = [Norm(random(dim, seed=3 + i, dtype=dtype), 1e-5) for i in range(2)]
    angles = [random(tokens, 2 * half, seed=5 + i, dtype=dtype) for i in range(2)]
    rotation = Rotation(*angles, *(head_norms if normed else []))
    qkv = random(tokens, kv_heads * (group + 2), dim, seed=7, dtype=dtype)
    layout = StepLayout(
        cu_q=torch.tensor([0, tokens], dtype=torch.int32),
        kv_len=torch.tensor([tokens], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(tokens).flip(0),
        block_size=tokens,
    )
    results = []
    for backend in (native, plain):
        pools = [torch.zeros(1, tokens, kv_heads, dim, dtype=dtype) for _ in range(2)]
        plan: Any = backend.plan(layout, CPU)
        query = backend.rotate_and_write(qkv, rotation, LayerCache(*pools), plan)
        stored = backend.in_order(LayerCache(*pools), dtype)
        results.append([query, *stored.tensors])
    torch.testing.assert_close(*results, **tolerance)


def test_what_the_kernels_cannot_take_is_refused(native: NativeBackend) -> None:
    prompts, half = Prompts([20], torch.float16), random(4, 8, seed=0, dtype=torch.float16)
    with pytest.raises(TypeError, match="float16"):
        prompts.step(native, {0: (0, 20)}, SPEC)
    with pytest.raises(TypeError, match="float16"):
        native.ops.rms_norm(half, Norm(torch.ones(8), 1e-5))
    with pytest.raises(ValueError, match="rows of 8"):
        native.ops.rms_norm(half.float(), Norm(torch.ones(7), 1e-5))
    with pytest.raises(TypeError, match="weight"):
        native.ops.rms_norm(half.float(), Norm(torch.ones(8).bfloat16(), 1e-5))
    angles = random(20, DIM, seed=1).bfloat16()
    layout = StepLayout(
        *(torch.zeros(2, dtype=torch.int32) for _ in range(2)),
        block_table=torch.zeros(1, 2, dtype=torch.int32),
        slot_mapping=torch.arange(20),
        block_size=SIZE,
    )
    pools = (torch.zeros(2, SIZE, KV_HEADS, DIM) for _ in range(2))
    with pytest.raises(TypeError, match="bfloat16"):
        native.rotate_and_write(
            random(20, HEADS + 2 * KV_HEADS, DIM, seed=2),
            Rotation(angles, angles),
            LayerCache(*pools),
            native.plan(layout, CPU),
        )


def test_a_fork_waits_for_no_threads_that_it_does_not_have(tier: str) -> None:
    script = (
        "import os\n"
        "from ragcache_kernels.native.library import Team\n"
        f"team = Team({tier!r}, threads=2)\n"
        "child = os.fork()\n"
        "del team\n"
        "os._exit(0) if child == 0 else exit(os.waitpid(child, 0)[1])\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
