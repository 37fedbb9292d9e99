"""The figures of `ragcache bench quality`, from logits that are known."""

import math

import pytest
import torch

from ragcache.bench.quality import compare, render

TOKENS = torch.tensor([0, 1, 0])


def logits(*chances):
    return torch.tensor(chances, dtype=torch.float64).log()


def test_equal_models_have_no_divergence():
    rows = logits([0.5, 0.5], [0.25, 0.75], [0.5, 0.5])
    found = compare(rows, rows, TOKENS)
    assert found["positions"] == 2
    assert found["perplexity"] == pytest.approx(math.sqrt(2 * 4))
    assert (found["perplexity_ratio"], found["same_greedy_tokens"]) == (1, 1)
    assert found["mean_divergence"] == pytest.approx(0, abs=1e-12)


def test_figures_are_those_of_the_formulas():
    plain = logits([0.6, 0.4], [0.25, 0.75], [0.9, 0.1])
    found = compare(plain, logits([0.4, 0.6], [0.25, 0.75], [0.1, 0.9]), TOKENS)
    assert found["plain_perplexity"] == pytest.approx((0.4 * 0.25) ** -0.5)
    assert found["perplexity"] == pytest.approx((0.6 * 0.25) ** -0.5)
    assert found["same_greedy_tokens"] == 0.5
    divergence = 0.6 * math.log(0.6 / 0.4) + 0.4 * math.log(0.4 / 0.6)
    assert found["mean_divergence"] == pytest.approx(divergence / 2)
    table = render({"model": "m", "quantization": "int8", **found})
    assert table.row_count == 4
