"""Settings of the engines that benchmarks start."""

from __future__ import annotations

from typing import Any

from ragcache.config import ServeSettings


def apart(**options: Any) -> ServeSettings:
    """The defaults but for `options`, whatever variables and files of the user say.

    They are taken as they are: what validates settings would also look at the environment.
    """
    return ServeSettings.model_construct(**options)
