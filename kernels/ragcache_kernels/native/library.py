"""The C library: which of its builds this processor runs, its functions, its threads.

Built at installation (see setup.py), if there was a compiler; plain C, reached through ctypes, so
it depends on no version of Python or torch. Calls release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch

from ragcache_kernels.native.structs import declare

FOLDER = Path(__file__).parent
TIERS = ("baseline", "avx2", "avx512", "avx512_bf16")  # rising, as `best_tier` counts them
VARIABLE = "RAGCACHE_ISA"  # forces a tier, to test or to compare


class NativeUnavailable(RuntimeError):
    """Why there is no native library: not built, or not for this processor."""


def supported_tiers() -> list[str]:
    """The tiers that are built and that this processor runs, the best one last."""
    try:
        best = ctypes.CDLL(str(_path(TIERS[0]))).best_tier()
    except OSError:
        return []
    return [tier for tier in TIERS[: best + 1] if _path(tier).exists()]


def chosen_tier() -> str:
    """The tier that runs.

    Raises:
        NativeUnavailable: without a compiled library, or when the forced tier cannot run.
    """
    tiers = supported_tiers()
    if not tiers:
        raise NativeUnavailable("the C kernels were not built: there was no compiler")
    tier = os.environ.get(VARIABLE, tiers[-1])
    if tier not in tiers:
        raise NativeUnavailable(f"{VARIABLE}={tier}: this machine runs {', '.join(tiers)}")
    return tier


@cache
def load(tier: str) -> ctypes.CDLL:
    """The library of a tier, its functions declared."""
    library = ctypes.CDLL(str(_path(tier)))
    library.team_new.restype = ctypes.c_void_p
    library.team_new.argtypes = [ctypes.c_int]
    library.team_free.argtypes = [ctypes.c_void_p]
    library.run_linear.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.run_linear.restype = None
    library.run_layers.argtypes = [ctypes.c_void_p] * 2
    library.run_layers.restype = None
    declare(library)
    return library


class Team:
    """The library of a tier, with threads; as many as torch uses.

    Not thread-safe: a team runs one call at a time. Threads end with the object.
    """

    def __init__(self, tier: str | None = None, threads: int | None = None) -> None:
        self.tier = tier or chosen_tier()
        self.threads = threads or torch.get_num_threads()
        self.library = load(self.tier)
        self.handle = self.library.team_new(self.threads)
        self._process = os.getpid()
        if not self.handle:
            raise MemoryError(f"{self.threads} threads cannot be had")

    def __del__(self) -> None:
        # A forked process has the object without the threads, which it would wait for.
        if getattr(self, "handle", None) and self._process == os.getpid():
            self.library.team_free(self.handle)


def _path(tier: str) -> Path:
    return FOLDER / f"{tier}.so"
