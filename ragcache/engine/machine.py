"""What of this machine the process may use: cores and memory, with the limits of a container."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")  # version 2, as this process sees it


def cpu_name() -> str:
    """The name of the processor, where Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def usable_cores() -> float:
    """Cores that this process may run on, and no more than its container may use of them."""
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(mask), _container_cores())


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken there, without those that others hold."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(int(psutil.virtual_memory().available), _container_memory())


def _container_cores() -> float:
    limit = _limit("cpu.max")
    if limit is None:
        return float("inf")
    quota, period = limit.split()
    return float("inf") if quota == "max" else int(quota) / int(period)


def _container_memory() -> int:
    limit, used = _limit("memory.max"), _limit("memory.current")
    if limit is None or used is None or limit == "max":
        return sys.maxsize
    return int(limit) - int(used)


def _limit(name: str) -> str | None:
    """What a file of the control group says; None where there is no such group."""
    try:
        return (CGROUP / name).read_text().strip()
    except OSError:
        return None
