"""Keys and values in eight bits: each row of a token and a KV head has a scale of its own.

A row is quantised once, when it is written, so what a later step reads never depends on which
step wrote it. Symmetric, to int8 or to float8 e4m3 (OCP 8-bit floating point specification).
"""

from __future__ import annotations

import torch
from torch import Tensor

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # what the largest of a row becomes
FLOAT8_CAPABILITY = (8, 9)
SMALLEST = 1e-30  # rows below it, of zeros above all, must not be divided by zero


def quantise(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows `[…, D]` as `dtype`, and the scales `[…]` float32 that give them back."""
    rows = rows.float()
    scale = rows.abs().amax(-1).clamp_min(SMALLEST) / LIMITS[dtype]
    rows = rows / scale.unsqueeze(-1)
    return (rows.round() if dtype is torch.int8 else rows).to(dtype), scale


def quantised_dtypes(device: torch.device) -> list[torch.dtype]:
    """What rows can be quantised to: older GPUs know no float8."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        return [torch.int8]
    return list(LIMITS)


def as_integers(stored: Tensor) -> Tensor:
    """The same memory in a dtype that torch can index, which float8 is not."""
    return stored.view(torch.int8) if stored.dtype is torch.float8_e4m3fn else stored
