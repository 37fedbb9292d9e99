"""The fused steps of a layer on every backend, against float64; on a GPU if there is one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ragcache_kernels import AttentionBackend, LayerCache, StepLayout
from ragcache_kernels.layer_ops import Activation, Norm, Rotation
from torch import Tensor
from torch.nn import functional as F

Backend = AttentionBackend[Any]
# Triton's interpreter cuts bfloat16 off where a device rounds.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = sorted(TOLERANCE, key=str)
SIZE = 4  # slots in a block


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor) -> None:
    assert not expected.isnan().any()
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def part_of_wider_rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[T, …]` whose rows begin at odd offsets, with NaN between them."""
    rows = random(shape[0], math.prod(shape[1:]), dtype=dtype)
    padding = torch.full((len(rows), 5), torch.nan, dtype=dtype, device=DEVICE)
    wider = torch.cat((padding[:, :3], rows, padding[:, :2]), dim=1)
    return wider[:, 3:-2].unflatten(1, shape[1:])


def normalised(rows: Tensor, norm: Norm) -> Tensor:
    x = rows.double()
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["weight in the model's dtype", "weight in float32"])
@pytest.mark.parametrize("size", [5, 64, 576, 3000])
def test_norms_equal_the_reference(
    backend: Backend, size: int, kind: str, dtype: torch.dtype
) -> None:
    hidden = part_of_wider_rows(4, size, dtype=dtype)
    weight = random(size, seed=1, dtype=torch.float32 if "float32" in kind else dtype)
    norm = Norm(weight, 1e-3)
    close(backend.ops.rms_norm(hidden, norm), normalised(hidden, norm))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [5, 576])
def test_a_sum_is_rounded_and_then_normalised(
    backend: Backend, size: int, dtype: torch.dtype
) -> None:
    hidden = part_of_wider_rows(4, size, dtype=dtype)
    update = 3 * random(4, size + 3, seed=1, dtype=dtype)[:, 3:]
    before = hidden.clone()
    norm = Norm(random(size, seed=2, dtype=dtype), 1e-6)
    total, normed = backend.ops.add_rms_norm(update, hidden, norm)
    close(total, before.double() + update.double())
    close(normed, normalised(total, norm))
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [48, 1500])
def test_gated_products_equal_the_reference(
    backend: Backend, size: int, activation: Activation, dtype: torch.dtype
) -> None:
    hidden, weight = random(3, 16, dtype=dtype), random(2 * size, 16, seed=1, dtype=dtype)
    gate, up = F.linear(hidden, weight).double().chunk(2, dim=1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    close(backend.ops.gated(hidden, weight, activation) / 16, active * up / 16)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_far_from_zero_are_open_or_shut(backend: Backend, activation: Activation) -> None:
    weight = torch.tensor([[1000.0], [-1000.0], [3.0], [3.0]], device=DEVICE)
    out = backend.ops.gated(torch.ones(1, 1, device=DEVICE), weight, activation)
    assert out.tolist() == [[3000.0, pytest.approx(0.0, abs=1e-30)]]


def rotation_for(qkv: Tensor, rotary: int, *, normed: bool) -> Rotation:
    tokens, _, dim = qkv.shape
    angles = random(tokens, rotary // 2, seed=5).repeat(1, 2)
    cos, sin = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)
    if not normed:
        return Rotation(cos, sin)
    norms = (Norm(random(dim, seed=6 + i, dtype=qkv.dtype), 1e-4) for i in range(2))
    return Rotation(cos, sin, *norms)


def rotated(heads: Tensor, norm: Norm | None, rotation: Rotation) -> Tensor:
    """By complex numbers, which is what the rotation means."""
    x = heads.double() if norm is None else normalised(heads, norm)
    half = rotation.cos.shape[1] // 2
    turn = torch.complex(rotation.cos.double(), rotation.sin.double())[:, None, :half]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


def layout_of(slots: list[int]) -> StepLayout:
    return StepLayout(
        cu_q=torch.tensor([0, len(slots)], dtype=torch.int32),
        kv_len=torch.tensor([len(slots)], dtype=torch.int32),
        block_table=torch.zeros(1, len(slots), dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        block_size=SIZE,
    )


def check_rotation(
    backend: Backend, qkv: Tensor, kv_heads: int, rotation: Rotation, cache: LayerCache
) -> None:
    """Write tokens to scattered slots of a pool of NaN, and the third to none."""
    slots = [9, 2, -1, 7, 0][: len(qkv)]
    used = [slot for slot in slots if slot >= 0]
    plan = backend.plan(layout_of(slots), DEVICE)
    query = backend.rotate_and_write(qkv, rotation, cache, plan)
    close(query, rotated(qkv[:, : -2 * kv_heads], rotation.query_norm, rotation))
    keys = rotated(qkv[:, -2 * kv_heads : -kv_heads], rotation.key_norm, rotation)
    for stored, rows in ((cache.key, keys), (cache.value, qkv[:, -kv_heads:].double())):
        written = torch.tensor([slot >= 0 for slot in slots])
        close(stored.flatten(0, 1)[used], rows[written])
        rest = torch.ones(3 * SIZE, dtype=torch.bool).index_fill_(0, torch.tensor(used), 0)
        assert stored.flatten(0, 1)[: 3 * SIZE][rest].isnan().all()


def nan_cache(kv_heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    shape = (3, SIZE, kv_heads, dim)
    key, value = (torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    return LayerCache(key, value)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("rotary", [1.0, 0.5], ids=["all", "half"])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim"),
    [(1, 8, 64), (3, 3, 64), (2, 4, 80), (2, 5, 96), (4, 1, 128), (1, 4, 256)],
)
def test_queries_rotate_and_keys_and_values_reach_their_slots(
    backend: Backend, kv_heads: int, group: int, dim: int, rotary: float, normed: bool
) -> None:
    qkv = random(5, kv_heads * (group + 2), dim)
    rotation = rotation_for(qkv, int(dim * rotary), normed=normed)
    check_rotation(backend, qkv, kv_heads, rotation, nan_cache(kv_heads, dim, qkv.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_half_precision_rotates_within_its_rounding(
    backend: Backend, normed: bool, dtype: torch.dtype
) -> None:
    qkv = random(5, 10, 64, dtype=dtype)
    rotation = rotation_for(qkv, 64, normed=normed)
    check_rotation(backend, qkv, 2, rotation, nan_cache(2, 64, dtype))


def test_a_part_of_wider_rows_rotates(backend: Backend) -> None:
    qkv = part_of_wider_rows(5, 10, 64)
    check_rotation(
        backend, qkv, 2, rotation_for(qkv, 64, normed=False), nan_cache(2, 64, qkv.dtype)
    )


def test_rotated_keys_are_quantised_as_they_are_stored(backend: Backend) -> None:
    qkv, slots = random(3, 12, 64), [9, -1, 2]
    rotation = rotation_for(qkv, 64, normed=True)
    key, value = (torch.zeros(3, SIZE, 3, 64, dtype=torch.int8, device=DEVICE) for _ in range(2))
    scales = [torch.full((3, SIZE, 3), torch.nan, device=DEVICE) for _ in range(2)]
    cache = LayerCache(key, value, *scales)
    backend.rotate_and_write(qkv, rotation, cache, backend.plan(layout_of(slots), DEVICE))
    keys = rotated(qkv[:, 6:9], rotation.key_norm, rotation)
    stored = zip((key, value), scales, (keys, qkv[:, 9:].double()), strict=True)
    for integers, scale, rows in stored:
        found = integers.flatten(0, 1)[[9, 2]] * scale.flatten(0, 1)[[9, 2]].unsqueeze(-1)
        expected = rows[[0, 2]]
        step = expected.abs().amax(-1, keepdim=True) / 127
        assert ((found - expected).abs() <= 0.51 * step).all()
        assert scale.isnan().sum() == scale.numel() - 2 * 3


def test_keys_and_values_reach_slots_behind_two_billion_elements(backend: Backend) -> None:
    blocks = 2**31 // (SIZE * 128) + 1
    cache = LayerCache(  # untouched, so not there
        *(torch.empty(blocks, SIZE, 1, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    )
    last = blocks * SIZE - 1
    qkv = random(1, 3, 128, dtype=torch.bfloat16)
    rotation = rotation_for(qkv, 128, normed=False)
    backend.rotate_and_write(qkv, rotation, cache, backend.plan(layout_of([last]), DEVICE))
    close(cache.key[-1, -1][None], rotated(qkv[:, 1:2], None, rotation))
    assert torch.equal(cache.value[-1, -1], qkv[0, 2:])
