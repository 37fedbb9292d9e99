"""Many short ranges as one array."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

IntT = TypeVar("IntT", bound=np.integer)


def ranges(starts: NDArray[IntT], counts: NDArray[IntT]) -> NDArray[IntT]:
    """`start … start + count − 1` for each pair in a row: `[5, 0]`, `[2, 3]` give `[5 6 0 1 2]`."""
    shifts = np.repeat(starts + counts - counts.cumsum(), counts)
    return (shifts + np.arange(len(shifts))).astype(starts.dtype)
