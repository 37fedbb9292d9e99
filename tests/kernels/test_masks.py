"""Grammar masks on logits: the GPU kernel and the plain way allow and forbid the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ragcache_kernels import LOWEST, apply_masks
from ragcache_kernels.triton.mask import mask_rows
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = [4, 0, 3]  # of 5


def launch(logits: Tensor, rows: list[int], bits: NDArray[np.int32]) -> None:
    packed = np.concatenate([np.array(rows, dtype=np.int32)[:, None], bits], axis=1)
    mask_rows(logits, torch.from_numpy(packed).to(logits.device))


def masks(vocab_size: int, density: float) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
    """Random ones for `ROWS`, plain and packed; bits behind the vocabulary are set too."""
    words = -(-vocab_size // 32)
    flags = np.random.default_rng(vocab_size).random((len(ROWS), 32 * words)) < density
    flags[:, vocab_size:] = True
    packed = np.packbits(flags, axis=1, bitorder="little").view(np.int32)
    return flags[:, :vocab_size], packed


@pytest.mark.parametrize("way", [apply_masks, launch])
@pytest.mark.parametrize("density", [0.02, 0.5, 1.0])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 1024, 2085])
def test_allowed_tokens_keep_their_logits_and_no_other_row_changes(way, density, vocab_size):
    flags, bits = masks(vocab_size, density)
    wider = torch.randn(5, vocab_size + 7, device=DEVICE)
    before, logits = wider.cpu(), wider[:, :vocab_size]
    way(logits, ROWS, bits)
    expected = before.clone()
    for i, allowed in zip(ROWS, torch.from_numpy(flags), strict=True):
        expected[i, :vocab_size].masked_fill_(~allowed, -torch.inf)
    torch.testing.assert_close(wider.cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("way", [apply_masks, launch])
def test_an_allowed_token_is_better_than_a_forbidden_one_whatever_its_logit(way):
    logits = torch.tensor([[-torch.inf, LOWEST, 5.0, -torch.inf]], device=DEVICE)
    way(logits, [0], np.array([[0b1011]], dtype=np.int32))
    assert logits.tolist() == [[LOWEST, LOWEST, -torch.inf, LOWEST]]
