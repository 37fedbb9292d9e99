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
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a thread block may have
# Four blocks with narrow tiles must fit on a processor at once: only that hides the memory.
NARROW_SHARED = {80: 40 * 1024, 90: 56 * 1024}
# For head dims up to 128, of 64k registers: narrow tiles have 128 threads, wide ones 256.
REGISTERS = {"narrow": 168, "wide": 255, "merge": 64, "write": 48}

Found = dict[str, dict[str, int]]


@pytest.fixture(scope="module", params=SHARED, ids="sm_{}".format)
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
        assert used["shared"] <= SHARED[arch], name
        if "256" in name:
            continue
        assert used["registers"] <= REGISTERS[kind], name
        if kind == "narrow":
            assert used["shared"] <= NARROW_SHARED[arch], name


def test_keys_and_values_are_loaded_16_bytes_at_a_time_and_ahead(
    compiled: tuple[int, Found],
) -> None:
    _, found = compiled
    attention = {name: used for name, used in found.items() if name.startswith(("narrow", "wide"))}
    assert len(attention) == 11
    assert {name for name, used in attention.items() if used["wide_loads"] < 16} == set()
