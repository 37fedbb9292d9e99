"""Packed masks over the vocabulary, applied to all masked rows of logits in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 32  # of a program: 1024 tokens
LOWEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def mask_words(
    logits_ptr,
    packed_ptr,
    logits_row,
    packed_row,
    vocab_size,
    WORDS: tl.constexpr,
):
    """Program (i, c): words [c · WORDS, (c + 1) · WORDS) of mask i, which row `packed[i, 0]` gets.

    `packed` `[R, 1 + ceil(vocab_size / 32)]` int32 has the words of a mask behind its row.
    """
    mask_ptr = packed_ptr + tl.program_id(0).to(tl.int64) * packed_row
    row_ptr = logits_ptr + tl.load(mask_ptr).to(tl.int64) * logits_row
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(mask_ptr + 1 + word, mask=word * 32 < vocab_size, other=0)
    bit = tl.arange(0, 32)
    allowed = (bits[:, None] >> bit[None, :]) & 1 != 0
    token = word[:, None] * 32 + bit[None, :]
    inside = token < vocab_size
    logits = tl.load(row_ptr + token, mask=inside & allowed, other=0.0)
    logits = tl.where(logits < LOWEST, LOWEST, logits)
    tl.store(row_ptr + token, tl.where(allowed, logits, float("-inf")), mask=inside)


def mask_rows(logits: Tensor, packed: Tensor) -> None:
    """Apply `packed` masks (see `mask_words`) to logits `[S, V]` float32 in place."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    vocab_size = logits.shape[1]
    grid = (len(packed), triton.cdiv(vocab_size, 32 * WORDS))
    mask_words[grid](logits, packed, logits.stride(0), packed.stride(0), vocab_size, WORDS=WORDS)
