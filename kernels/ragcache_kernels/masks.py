"""Masks over the vocabulary, as packed bits, applied to logits where these are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache_kernels.registry import takes_kernels
from ragcache_kernels.transfer import upload

LOWEST = torch.finfo(torch.float32).min  # as good as forbidden, but better than not allowed


def apply_masks(logits: Tensor, rows: Sequence[int], bits: NDArray[np.int32]) -> None:
    """Allow in row `rows[i]` of `logits` `[S, V]` float32, in place, the tokens of mask i only.

    `bits` is `[len(rows), ceil(V / 32)]`: token t is allowed if bit t % 32 of `bits[i, t // 32]`
    is set, and then has at least the logit `LOWEST`; all others get −inf.
    """
    if takes_kernels(logits.device):
        from ragcache_kernels.triton.mask import mask_rows

        packed = np.concatenate([np.array(rows, dtype=np.int32)[:, None], bits], axis=1)
        mask_rows(logits, upload(packed, logits.device))
    else:
        _mask_rows(logits, rows, upload(bits.view(np.uint8), logits.device))


def _mask_rows(logits: Tensor, rows: Sequence[int], octets: Tensor) -> None:
    vocab_size = logits.shape[1]
    bounds = _bounds_of_octets(logits.device).index_select(0, octets.int().flatten())
    for bound, i in zip(bounds.view(len(rows), -1), rows, strict=True):
        row = logits[i].clamp_(min=LOWEST)
        torch.minimum(row, bound[:vocab_size], out=row)


@cache
def _bounds_of_octets(device: torch.device) -> Tensor:
    """Upper bounds for the logits of 8 tokens, `[256, 8]`: infinity where a bit is set.

    Looking bits up and taking minima is several times faster on a CPU than shifts and
    `torch.where`.
    """
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits.bool(), torch.inf, -torch.inf).to(device)
