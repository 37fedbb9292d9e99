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

PROGRAM = Path(__file__).parent / "compile_ahead.py"
# Bytes and registers with which three blocks of narrow tiles, or one of wide ones, fit on a
# processor at once, which is what hides the memory: 128 and 256 threads, of 64k registers.
SHARED_OF = {
    80: {"narrow": 43 * 1024, "wide": 70 * 1024},
    90: {"narrow": 43 * 1024, "wide": 99 * 1024},
}
REGISTERS = {
    "narrow": 168,
    "wide": 255,
    "merge": 48,
    "write": 32,
    "move": 48,
    "norm": 72,
    "gate": 40,
    "mask": 32,
}

Found = dict[str, dict[str, int]]


@pytest.fixture(scope="module", params=SHARED_OF, ids="sm_{}".format)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Found]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, str(PROGRAM), str(request.param)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return request.param, json.loads(ran.stdout.splitlines()[-1])


def test_nothing_spills(compiled: tuple[int, Found]) -> None:
    _, found = compiled
    assert {name for name, used in found.items() if used["spills"]} == set()


def test_registers_and_shared_memory_are_within_bounds(compiled: tuple[int, Found]) -> None:
    arch, found = compiled
    for name, used in found.items():
        kind = name.split()[0]
        assert used["shared"] <= SHARED_OF[arch].get(kind, 1024), name
        assert used["registers"] <= REGISTERS[kind], name


def test_keys_and_values_are_loaded_16_bytes_at_a_time_and_ahead(
    compiled: tuple[int, Found],
) -> None:
    _, found = compiled
    attention = {name: used for name, used in found.items() if name.startswith(("narrow", "wide"))}
    assert len(attention) == 28
    assert {name for name, used in attention.items() if used["wide_loads"] < 16} == set()


def test_rows_are_loaded_several_elements_at_a_time(compiled: tuple[int, Found]) -> None:
    _, found = compiled
    rows = {name: used for name, used in found.items() if name.startswith(("norm", "gate"))}
    assert len(rows) == 5
    assert {name for name, used in rows.items() if used["narrow_loads"]} == set()
