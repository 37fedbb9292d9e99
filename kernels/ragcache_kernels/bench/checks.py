"""A backend against the float64 reference on the device at hand, with the shapes of real models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ragcache_kernels.bench.layer import BLOCK_SIZE, Heads, blocks_for
from ragcache_kernels.interface import AttentionBackend, AttentionSpec, LayerCache, StepLayout
from ragcache_kernels.quantise import as_integers
from ragcache_kernels.reference import reference_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Query tokens and context of each sequence; the last ones decode behind common blocks.
LENGTHS = [(1, 1), (1, 700), (5, 5), (7, 523), (130, 650)]
SHARED = 512
SHARING = [(1, SHARED + own) for own in (1, 16, 33, 200)]


@dataclass(frozen=True, slots=True)
class Check:
    """A step of one layer; `recorded`: by a plan for launches that can be recorded."""

    group: int
    dim: int
    dtype: torch.dtype
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    recorded: bool = False
    storage: torch.dtype | None = None  # of the cache, if it is quantised

    @property
    def name(self) -> str:
        """What makes it different from others."""
        options = [f"window {self.window}"] if self.window else []
        options += [f"softcap {self.softcap}"] if self.softcap else []
        options += ["sinks"] if self.sinks else []
        options += ["recorded"] if self.recorded else []
        options += [f"cache of {_name(self.storage)}"] if self.storage else []
        kind = _name(self.dtype)
        return ", ".join([f"group {self.group}", f"dim {self.dim}", kind, *options])

    def error(self, backend: AttentionBackend[Any], device: torch.device) -> float:
        """The largest difference to the reference, as a multiple of what rounding excuses."""
        heads = Heads(2 * self.group, 2, self.dim)
        query, cache, layout = _step(self, heads, backend, device)
        sinks = torch.linspace(-2, 3, heads.query, device=device) if self.sinks else None
        spec = AttentionSpec(self.dim**-0.5, self.window, self.softcap, sinks)
        plan: Any = backend.plan(layout, device)
        out = backend.attend(query, cache, plan, spec)
        if self.recorded:
            longest = int(layout.kv_len.max())
            tokens = len(cache.key) * BLOCK_SIZE
            plan = backend.fixed_plan(len(query), longest, tokens, BLOCK_SIZE, device)
            if not plan.update(layout):
                raise AssertionError("the step does not fit in a plan that was made for it")
            out = backend.attend(query, cache, plan, spec)
        stored = LayerCache(*(tensor.cpu() for tensor in cache.tensors))
        spec = replace(spec, sinks=None if sinks is None else sinks.cpu())
        expected = reference_attention(query.cpu(), stored, layout, spec)
        return excess(out, expected)


def excess(found: Tensor, expected: Tensor) -> float:
    """The largest difference to a float64 result, as a multiple of what rounding excuses."""
    excused = TOLERANCE[found.dtype] * (1 + expected.abs())
    difference = (found.cpu().double() - expected).abs() / excused
    return float(difference.nan_to_num(torch.inf).max())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def checks(
    dtype: torch.dtype, storages: Iterable[torch.dtype], *, recorded: bool
) -> Iterator[Check]:
    """The most important ones first; `storages` are those of quantised caches."""
    plain = Check(4, 128, dtype)
    yield plain
    yield replace(plain, window=100, sinks=True)
    yield replace(plain, softcap=20.0)
    for storage in storages:
        yield replace(plain, storage=storage)
    if recorded:
        yield replace(plain, recorded=True)
        yield replace(plain, window=100, recorded=True)
    for group, dim in ((3, 64), (8, 128), (2, 256), (4, 80), (1, 96), (5, 128)):
        yield Check(group, dim, dtype)


def _step(
    check: Check, heads: Heads, backend: AttentionBackend[Any], device: torch.device
) -> tuple[Tensor, LayerCache, StepLayout]:
    """Queries, a cache to which the backend wrote all keys and values, and their layout."""
    lengths = SHARING if check.recorded else LENGTHS + SHARING
    queries, kv_len = torch.tensor(lengths, dtype=torch.int32).T.contiguous()
    table, slots = _pages(kv_len)
    shape = (int(table.max()) + 2, BLOCK_SIZE, heads.kv, heads.dim)
    cache = _unwritten(check, shape, device)
    tokens = (len(slots), heads.kv, heads.dim)
    key, value = (torch.randn(tokens, device=device).to(check.dtype) for _ in range(2))
    written = StepLayout(_sums(kv_len), kv_len, table, slots, BLOCK_SIZE)
    backend.write_kv(key, value, cache, backend.plan(written, device))
    _look(cache.key, cache.key_scale, slots, key)
    _look(cache.value, cache.value_scale, slots, value)
    count = int(queries.sum())
    query = torch.randn(count, heads.query, heads.dim, device=device).to(check.dtype)
    nowhere = torch.full((count,), -1)
    return query, cache, StepLayout(_sums(queries), kv_len, table, nowhere, BLOCK_SIZE)


def _unwritten(check: Check, shape: tuple[int, ...], device: torch.device) -> LayerCache:
    """A cache of NaN, which must not be seen; integers have none, but their scales do."""
    tensors = [torch.full(shape, torch.nan, dtype=check.dtype, device=device) for _ in range(2)]
    if check.storage is not None:
        tensors = [torch.full(shape, -1, dtype=torch.int8, device=device) for _ in range(2)]
        tensors = [tensor.view(check.storage) for tensor in tensors]
        tensors += [torch.full(shape[:3], torch.nan, device=device) for _ in range(2)]
    return LayerCache(*tensors)


def _look(cache: Tensor, scale: Tensor | None, slots: Tensor, new: Tensor) -> None:
    """Whether `new` `[T, Hkv, D]` stands in its slots."""
    new, slots = new[slots >= 0], slots[slots >= 0]
    found = as_integers(cache).flatten(0, 1)[slots].view(cache.dtype)
    if scale is None:
        right = torch.equal(found, new)
    else:  # as exact as three bits of mantissa, or a hundredth of the largest
        found = found.float() * scale.flatten(0, 1)[slots].unsqueeze(-1)
        right = torch.allclose(found, new.float(), rtol=0.07, atol=0.05)
    if not right:
        raise AssertionError("keys or values are not where they were to be written")


def _pages(kv_len: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks in random places, and the slot of each token; -1 where another sequence writes it."""
    blocks = [blocks_for(length) for length in kv_len.tolist()]
    ids = torch.split(torch.randperm(sum(blocks), dtype=torch.int32), blocks)
    table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, own in zip(table, ids, strict=True):
        row[: len(own)] = own
    sharing, common = len(kv_len) - len(SHARING), SHARED // BLOCK_SIZE
    table[sharing:, :common] = table[sharing, :common].clone()
    slots = []
    for s, length in enumerate(kv_len.tolist()):
        positions = torch.arange(length)
        of_sequence = table[s].long()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        if s > sharing:
            of_sequence[:SHARED] = -1
        slots.append(of_sequence)
    return table, torch.cat(slots)


def _sums(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
