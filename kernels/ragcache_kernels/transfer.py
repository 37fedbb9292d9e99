"""Small arrays on their way to the device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on `device`, without waiting for what a GPU still has to do.

    From memory that is not pinned the host would wait. PyTorch gives pinned memory to nobody else
    before the copy is done.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
