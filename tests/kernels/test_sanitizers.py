"""The C sources under AddressSanitizer and UndefinedBehaviorSanitizer, through the same tests."""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from ragcache_kernels.native.library import supported_tiers

pytestmark = pytest.mark.timeout(1200)  # everything is slow under sanitizers, and on a busy machine

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "kernels/ragcache_kernels/native/src"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
TESTS = ["test_native.py", "test_native_layer.py", "test_linear.py"]


def compiler() -> list[str]:
    """One that has the sanitizer's library, which must be loaded first of all."""
    command = shlex.split(os.environ.get("CC", "cc"))
    if not shutil.which(command[0]):
        pytest.skip(f"there is no compiler {command[0]}")
    return command


def libasan(command: list[str]) -> str:
    found = subprocess.run(
        [*command, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{command[0]} has no libasan")
    return found


def flags(tier: str) -> list[str]:
    """How setup.py compiles a tier, but quicker to compile."""
    with patch("setuptools.setup"):
        build: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"))
    return [*build["FLAGS"], *build["TIERS"][tier], "-O1", "-g", "-fPIC", "-shared", "-pthread"]


@pytest.mark.parametrize("tier", supported_tiers())
def test_no_access_is_out_of_bounds_and_nothing_is_undefined(tier: str, tmp_path: Path) -> None:
    command = compiler()
    preload = libasan(command)
    options = [*flags(tier), *shlex.split(SANITIZERS)]
    for name in {"baseline", tier}:  # the first tells what the processor runs
        sources = sorted(SOURCES.glob("*.c")) if name == tier else [SOURCES / "tier.c"]
        target = ["-o", tmp_path / f"{name}.so"]
        subprocess.run([*command, *options, *target, *sources], check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",  # of Python and torch
        "NATIVE_LIBRARIES": str(tmp_path),
    }
    tests = [str(Path(__file__).with_name(name)) for name in TESTS]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-qs", "-p", "no:cacheprovider", "-k", tier, *tests],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
