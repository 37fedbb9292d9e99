"""What there is to run on, whatever the options say."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

import psutil
import torch
from ragcache_kernels.native.library import (
    VARIABLE,
    NativeUnavailable,
    chosen_tier,
    supported_tiers,
)

from ragcache.engine.machine import cpu_name, free_memory, usable_cores

DISTRIBUTIONS = {"ragcache": "ragcache-gateway"} | {
    name: name for name in ("torch", "transformers", "triton")
}
DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str | None]:
    """Of what decides how fast it is; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = version(distribution)
        except PackageNotFoundError:
            found[name] = None
    return found


@dataclass(frozen=True, slots=True)
class Native:
    """The C kernels: the builds that this processor runs, and the one that is taken or why none."""

    supported: list[str]
    tier: str | None
    forced: bool
    missing: str | None

    @classmethod
    def look(cls) -> Self:
        """As they are installed."""
        forced = VARIABLE in os.environ
        try:
            return cls(supported_tiers(), chosen_tier(), forced, None)
        except NativeUnavailable as error:
            return cls(supported_tiers(), None, forced, str(error))


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores are those that this process may use; memory is in bytes, and free."""

    cpu: str
    cores: float
    physical_cores: int | None
    threads: int
    memory: int
    gpus: list[str]
    nvidia_driver: bool
    native: Native

    @classmethod
    def look(cls) -> Self:
        """As it is now."""
        return cls(
            cpu=cpu_name(),
            cores=usable_cores(),
            physical_cores=psutil.cpu_count(logical=False),
            threads=torch.get_num_threads(),
            memory=free_memory(torch.device("cpu")),
            gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            nvidia_driver=DRIVER.exists(),
            native=Native.look(),
        )
