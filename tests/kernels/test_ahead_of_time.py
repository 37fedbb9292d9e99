"""The GPU kernels, compiled without a GPU, stay within what keeps several of them on a processor.

A lost hint of divisibility, or a spill, changes no result; on a GPU it costs half of the speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1200)  # a busy machine compiles for minutes

PROGRAM = Path(__file__).parent / "compile_ahead.py"
CASES = [
    (80, "torch.bfloat16"),
    (90, "torch.bfloat16"),
    (80, "torch.int8"),
    (90, "torch.int8"),
    (89, "torch.float8_e4m3fn"),  # which sm_80 does not have
    (90, "torch.float8_e4m3fn"),
]
# Bytes and registers with which three blocks of narrow tiles, or one of wide ones, fit on a
# processor at once, which is what hides the memory: 128 and 256 threads, of 64k registers. Keys of
# eight bits take registers in which to widen them, so two blocks of narrow tiles.
SHARED_OF = {
    80: {"narrow": 43 * 1024, "wide": 70 * 1024, "narrow8": 27 * 1024, "wide8": 70 * 1024},
    89: {"narrow8": 27 * 1024, "wide8": 70 * 1024},
    90: {"narrow": 43 * 1024, "wide": 99 * 1024, "narrow8": 27 * 1024, "wide8": 70 * 1024},
}
REGISTERS = {
    "narrow": 168,
    "wide": 255,
    "narrow8": 232,
    "wide8": 255,
    "merge": 48,
    "write": 32,
    "write8": 40,
    "move": 48,
    "rotate": 104,
    "rotate8": 48,
    "norm": 72,
    "gate": 40,
    "mask": 32,
}

Found = dict[str, dict[str, int]]


@pytest.fixture(scope="module", params=CASES, ids="sm_{0[0]} {0[1]}".format)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, str, Found]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    arch, dtype = request.param
    command = [sys.executable, str(PROGRAM), str(arch), dtype]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return arch, dtype, json.loads(ran.stdout.splitlines()[-1])


def test_nothing_spills(compiled: tuple[int, str, Found]) -> None:
    _, _, found = compiled
    assert {name for name, used in found.items() if used["spills"]} == set()


def test_registers_and_shared_memory_are_within_bounds(compiled: tuple[int, str, Found]) -> None:
    arch, _, found = compiled
    for name, used in found.items():
        kind = name.split()[0]
        assert used["shared"] <= SHARED_OF[arch].get(kind, 1024), name
        assert used["registers"] <= REGISTERS[kind], name


def test_keys_and_values_are_loaded_16_bytes_at_a_time_and_ahead(
    compiled: tuple[int, str, Found],
) -> None:
    """Those of eight bits, of which a row has half as many, 8 bytes at least."""
    _, dtype, found = compiled
    attention = {name: used for name, used in found.items() if name.startswith(("narrow", "wide"))}
    quantised = dtype != "torch.bfloat16"
    assert len(attention) == (8 if quantised else 28)
    for name, used in attention.items():
        enough = 8 if quantised else 16
        assert used["wide_loads"] + quantised * used["half_wide_loads"] >= enough, name


def test_rows_are_loaded_several_elements_at_a_time(compiled: tuple[int, str, Found]) -> None:
    _, dtype, found = compiled
    rows = {name: used for name, used in found.items() if name.startswith(("norm", "gate"))}
    assert len(rows) == (5 if dtype == "torch.bfloat16" else 0)
    assert {name for name, used in rows.items() if used["narrow_loads"]} == set()


def test_heads_and_their_other_halves_are_loaded_16_bytes_at_a_time(
    compiled: tuple[int, str, Found],
) -> None:
    """Queries and keys, each with what they are turned by, and values."""
    _, dtype, found = compiled
    name = "rotate 128/8" if dtype == "torch.bfloat16" else "rotate8 128/8"
    assert found[name]["wide_row_loads"] >= 5
