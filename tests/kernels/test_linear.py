"""Packed linear layers against float64, on every instruction set that this machine runs."""

from __future__ import annotations

import pytest
import torch
from ragcache_kernels.native.library import Team, supported_tiers
from ragcache_kernels.native.linear import PackedLinear
from torch import Tensor
from torch.nn import functional as F

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 5e-3}  # of the largest result
SHAPES = [(1, 1), (7, 5), (131, 77), (256, 64), (700, 130), (4200, 40)]  # in, out
FLOATS = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
WHOLE_OR_INT8 = pytest.mark.parametrize("quantised", [False, True], ids=["whole", "int8"])


@pytest.fixture(params=supported_tiers(), scope="module")
def team(request: pytest.FixtureRequest) -> Team:
    return Team(request.param, threads=1)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.double() @ weight.double().T


def close(found: Tensor, expected: Tensor) -> None:
    assert not expected.isnan().any()
    error = (found.double() - expected).abs().max().item() if found.numel() else 0
    assert error <= TOLERANCE[found.dtype] * max(1, expected.abs().max().item())


@FLOATS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 5, 40, 113])
def test_products_equal_the_reference(
    team: Team, count: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    rows, weight = random(count, shape[0], dtype=dtype), random(*shape[::-1], seed=1, dtype=dtype)
    bias = random(shape[1], seed=2, dtype=dtype)
    close(PackedLinear(team, weight)(rows), product(rows, weight))
    close(PackedLinear(team, weight, bias)(rows), product(rows, weight) + bias.double())


@FLOATS
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_products_equal_the_reference(team, shape, activation, dtype):
    rows = random(23, shape[0], dtype=dtype)
    weight = random(2 * shape[1], shape[0], seed=1, dtype=dtype)
    gate, up = product(rows, weight).chunk(2, dim=1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    close(PackedLinear(team, weight, activation=activation)(rows), gate * up)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_of_any_size_give_numbers(team, activation):
    gates = torch.tensor([-3e38, -1e4, -90, -20, -1e-3, -0.0, 0.0, 1e-3, 20, 90, 1e4])[:, None]
    layer = PackedLinear(team, torch.ones(2, 1), activation=activation)
    plain = F.silu if activation == "silu" else F.gelu
    expected = torch.where(gates.abs() < 1e10, plain(gates) * gates, 0)
    torch.testing.assert_close(layer(gates), expected, rtol=1e-3, atol=1e-5)


@FLOATS
def test_results_are_added_and_rounded_once(team, dtype):
    rows, weight = random(9, 70, dtype=dtype), random(45, 70, seed=1, dtype=dtype)
    total = random(9, 45, seed=2, dtype=dtype)
    expected = total.double() + product(rows, weight)
    assert PackedLinear(team, weight).add_to(total, rows) is total
    close(total, expected)


@FLOATS
@WHOLE_OR_INT8
@pytest.mark.parametrize("count", [1, 9, 97])
def test_rows_may_be_parts_of_wider_ones(team, count, quantised, dtype):
    weight = random(45, 71, dtype=dtype)
    rows, total = random(count, 71, seed=1, dtype=dtype), random(count, 45, seed=2, dtype=dtype)
    layer = PackedLinear(team, weight, quantised=quantised)
    expected = layer.add_to(total.clone(), rows)
    wider = torch.full((count, 80), torch.nan, dtype=dtype)
    totals = torch.full((count, 60), torch.nan, dtype=dtype)
    wider[:, 3:74], totals[:, 5:50] = rows, total
    layer.add_to(totals[:, 5:50], wider[:, 3:74])
    assert torch.equal(totals[:, 5:50], expected)
    assert totals[:, :5].isnan().all()
    assert totals[:, 50:].isnan().all()


@FLOATS
@WHOLE_OR_INT8
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_row_gives_the_same_bits_in_any_batch(team, activation, quantised, dtype):
    weight, rows = random(50, 901, dtype=dtype), random(250, 901, seed=1, dtype=dtype)
    layer = PackedLinear(team, weight, activation=activation, quantised=quantised)
    alone = torch.cat([layer(row) for row in rows.split(1)])
    for count in (*range(2, 41), 95, 97, 250):
        assert torch.equal(layer(rows[:count]), alone[:count])


@FLOATS
@WHOLE_OR_INT8
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_threads_give_the_same_bits(team, threads, quantised, dtype):
    weight, rows = random(90, 300, dtype=dtype), random(210, 300, seed=1, dtype=dtype)
    several = PackedLinear(Team(team.tier, threads), weight, quantised=quantised)
    for count in (1, 20, 100, 210):
        expected = PackedLinear(team, weight, quantised=quantised)(rows[:count])
        assert torch.equal(several(rows[:count]), expected)


def quantise(rows: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """Rows as they are once quantised, and half of a step at each element."""
    padded = F.pad(rows.double(), (0, -rows.shape[1] % span)).unflatten(1, (-1, span))
    steps = padded.abs().amax(dim=2, keepdim=True) / 127
    whole = (padded / steps.clamp(min=1e-30)).round() * steps
    halves = (steps / 2).expand_as(padded)
    return whole.flatten(1)[:, : rows.shape[1]], halves.flatten(1)[:, : rows.shape[1]]


@FLOATS
@pytest.mark.parametrize("shape", [(1, 1), (131, 77), (4200, 40)], ids=str)
@pytest.mark.parametrize("count", [1, 7, 100])
def test_products_of_quantised_factors_are_exact(team, count, shape, dtype):
    weight, bias = random(*shape[::-1], dtype=dtype), random(shape[1], seed=1, dtype=dtype)
    rows = quantise(random(count, shape[0], seed=2), 64)[0].float()
    if dtype == torch.bfloat16:  # holds whole numbers up to 256
        rows = torch.randint(-126, 127, rows.shape).to(dtype)
        rows[:, ::64] = 127
    expected = product(rows, quantise(weight, shape[0])[0]) + bias.double()
    close(PackedLinear(team, weight, bias, quantised=True)(rows), expected)


@pytest.mark.parametrize("outlier", [1, 1000])
def test_quantising_errs_by_half_a_step_of_each_factor(team, outlier):
    rows, weight = random(30, 512), random(64, 512, seed=1)
    rows[:, 100] *= outlier
    found = PackedLinear(team, weight, quantised=True)(rows).double()
    (_, of_rows), (_, of_weight) = quantise(rows, 64), quantise(weight, 512)
    bound = product(of_rows, weight.abs()) + product(rows.abs(), of_weight)
    bound = 1.001 * (bound + product(of_rows, of_weight))
    assert ((found - product(rows, weight)).abs() <= bound).all()


def test_an_outlier_costs_only_its_neighbours_precision(team):
    rows, weight = random(30, 512), random(64, 512, seed=1)
    rows[:, 100] = 1000
    weight[:, 64:128] = 0  # of which the neighbours' is none
    found = PackedLinear(team, weight, quantised=True)(rows).double()
    expected = product(rows, weight)
    assert (found - expected).norm() <= 0.02 * expected.norm()


def test_rows_and_weights_of_zeros_quantise_to_zeros(team):
    layer = PackedLinear(team, torch.zeros(3, 8), quantised=True)
    assert torch.equal(layer(random(2, 8)), torch.zeros(2, 3))
    layer = PackedLinear(team, random(3, 8), quantised=True)
    assert torch.equal(layer(torch.zeros(2, 8)), torch.zeros(2, 3))


@pytest.mark.parametrize("quantised", [False, True])
def test_no_rows_give_none(team, quantised):
    assert PackedLinear(team, random(5, 3), quantised=quantised)(random(0, 3)).shape == (0, 5)


def test_packing_takes_no_more_than_the_weight(team):
    weight = random(96, 128)
    sizes = [
        PackedLinear(team, weight.to(dtype), quantised=quantised).nbytes
        for dtype, quantised in (
            (torch.float32, False),
            (torch.bfloat16, False),
            (torch.float32, True),
        )
    ]
    assert sizes == [4 * weight.numel(), 2 * weight.numel(), weight.numel() + 4 * 96]


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(2, 4), torch.zeros(5), torch.zeros(2, 5).bfloat16(), torch.zeros(5, 2).T],
    ids=["size", "dimensions", "dtype", "stride"],
)
def test_other_rows_are_refused(team, rows):
    layer = PackedLinear(team, random(3, 5))
    with pytest.raises(ValueError, match="rows"):
        layer(rows)


def test_totals_and_weights_that_do_not_fit_are_refused(team):
    with pytest.raises(ValueError, match="nothing to add"):
        PackedLinear(team, random(3, 5)).add_to(torch.zeros(2, 4), torch.zeros(2, 5))
    with pytest.raises(ValueError, match="nothing to add"):
        PackedLinear(team, random(4, 5), activation="silu").add_to(torch.zeros(2, 2), random(2, 5))
    with pytest.raises(TypeError, match="float16"):
        PackedLinear(team, random(3, 5).half())
