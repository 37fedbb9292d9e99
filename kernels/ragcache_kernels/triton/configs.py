"""How the attention kernel is cut and launched: a table, so that nothing is tuned while serving.

What `python -m ragcache_kernels.triton.tune` measured on a GPU stands in `tuned.json`; where that
has no entry, tables by head dim apply, which keep every kernel free of spills on sm_80 and sm_90.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

TUNED = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True, slots=True)
class Config:
    """Rows (`bm`) and keys (`bn`) of a step, warps, and stages of the pipeline.

    `maxnreg`: registers of a thread. Left alone, the assembler may rather spill some than have
    fewer blocks on a processor.
    """

    bm: int
    bn: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    @property
    def options(self) -> dict[str, int | bool | None]:
        """How to compile; the last one is about to change its default."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.maxnreg,
            "enable_fp_fusion": True,
        }


class Phase(StrEnum):
    """What kind of launch it is."""

    NARROW = "narrow"  # tiles with few rows, of decodes
    WIDE = "wide"  # tiles with many rows, of chunks and shared prefixes
    # The same, shared out among a fixed number of programs.
    NARROW_RECORDED = "narrow recorded"
    WIDE_RECORDED = "wide recorded"


class Case(NamedTuple):
    """What a configuration is for; `arch` is 90 for sm_90, `dtype` that of the cache."""

    arch: int
    dim: int
    group: int
    dtype: str
    phase: Phase


NARROW_ROWS = 16  # the least that a matrix instruction takes
WIDEST = 256  # elements of a head

# By head dim, the first that is large enough. What is recorded has as many rows as what is not,
# since both take the same tiles. Three stages where shared memory allows, since the address of a
# key depends on a loaded block id.
_NARROW = {
    128: Config(NARROW_ROWS, 64, 4, 3),
    WIDEST: Config(NARROW_ROWS, 32, 8, 3, maxnreg=128),
}
_WIDE = {
    128: Config(128, 64, 8, 3),
    WIDEST: Config(64, 32, 8, 2),
}
# Sharing tiles out takes some forty registers more, which sm_80 does not have.
_RECORDED_AMPERE = {
    Phase.NARROW_RECORDED: _NARROW | {128: Config(NARROW_ROWS, 32, 4, 3, maxnreg=168)},
    Phase.WIDE_RECORDED: {64: Config(128, 64, 8, 3)} | _WIDE | {128: Config(128, 32, 8, 3)},
}
# Keys of eight bits take half of the memory, but registers in which to widen them.
_EIGHT_BITS = {"torch.int8", "torch.float8_e4m3fn"}
_NARROW_8_BIT = {
    128: Config(NARROW_ROWS, 64, 4, 3, maxnreg=232),
    WIDEST: Config(NARROW_ROWS, 16, 4, 3, maxnreg=232),
}
_WIDE_8_BIT = {
    64: Config(128, 64, 8, 3),
    128: Config(128, 32, 8, 3),
    WIDEST: Config(32, 32, 4, 2),  # of more rows, what is recorded would spill
}
_WIDE_8_BIT_AMPERE = _WIDE_8_BIT | {64: Config(128, 32, 8, 3), 128: Config(64, 64, 8, 3)}


def choose(case: Case) -> Config:
    """The configuration for a case; raises ValueError for heads wider than `WIDEST`."""
    return _tuned().get(case) or default(case)


def default(case: Case) -> Config:
    """The configuration where nothing has been tuned; raises ValueError as `choose` does."""
    for limit, config in _table(case).items():
        if case.dim <= limit:
            return config
    raise ValueError(f"head dim {case.dim}: the GPU kernels take up to {WIDEST}")


def _table(case: Case) -> dict[int, Config]:
    narrow = case.phase in (Phase.NARROW, Phase.NARROW_RECORDED)
    ampere = not 90 <= case.arch < 120  # others have less shared memory, or no warp groups
    if case.dtype in _EIGHT_BITS:
        if narrow:
            return _NARROW_8_BIT
        return _WIDE_8_BIT_AMPERE if ampere else _WIDE_8_BIT
    plain = _NARROW if narrow else _WIDE
    return _RECORDED_AMPERE.get(case.phase, plain) if ampere else plain


def read_table(path: Path) -> dict[Case, Config]:
    """The table in a file such as `TUNED`."""
    return {
        Case(**row["case"] | {"phase": Phase(row["case"]["phase"])}): Config(**row["config"])
        for row in json.loads(path.read_text())
    }


@cache
def _tuned() -> dict[Case, Config]:
    return read_table(TUNED)
