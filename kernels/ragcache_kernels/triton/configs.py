"""How the attention kernel is cut and launched: a table, so that nothing is tuned while serving."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """Rows (`bm`) and keys (`bn`) of a step, warps, and stages of the pipeline."""

    bm: int
    bn: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int | bool]:
        """How to compile; the last one is about to change its default."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


NARROW_ROWS = 16  # the least that a matrix instruction takes
WIDEST = 256  # elements of a head

# By head dim, the first that is large enough: no spills on sm_80 and sm_90, and three stages where
# shared memory allows, since the address of a key depends on a loaded block id.
_NARROW = {
    128: Config(NARROW_ROWS, 64, 4, 3),
    WIDEST: Config(NARROW_ROWS, 32, 8, 3),
}
_WIDE = {
    128: Config(128, 64, 8, 3),
    WIDEST: Config(64, 32, 8, 2),
}


def choose(rows: int, dim: int) -> Config:
    """The configuration for tiles of at most `rows` rows; raises ValueError above `WIDEST`."""
    table = _NARROW if rows <= NARROW_ROWS else _WIDE
    for limit, config in table.items():
        if dim <= limit:
            return config
    raise ValueError(f"head dim {dim}: the GPU kernels take up to {WIDEST}")
