"""The script for a GPU, really run: on one if there is one, else with tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from ragcache_kernels import get_backend
from ragcache_kernels.bench import checks, moves_check
from ragcache_kernels.bench.goals import GOALS
from ragcache_kernels.bench.moves_check import CopiesCheck, MasksCheck
from ragcache_kernels.bench.ops_check import OpsCheck
from ragcache_kernels.torch_layer_ops import TorchLayerOps

from ragcache.bench import step_checks
from ragcache.bench.step_checks import ReplayCheck, SwapsCheck
from ragcache.engine.graphs import DecodeGraphs
from ragcache.engine.host_pool import PlainHostPool

SCRIPT = Path(__file__).parents[2] / "kernels/check_gpu.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "new"
    command = [sys.executable, str(SCRIPT), "--output", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return folder


def test_the_results_hold_checks_cases_and_a_verdict_on_every_goal(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text())
    assert results["checks"]
    assert all(check["right"] for check in results["checks"])
    assert results["failed"] == []
    keys = {case["key"] for case in results["cases"]}
    assert {"pages in a row", "varlen", "int8", "shared", "chunk", "decode step"} <= keys
    assert [judged["goal"] for judged in results["goals"]] == [goal.name for goal in GOALS]
    if not torch.cuda.is_available():
        assert {judged["verdict"] for judged in results["goals"]} == {"not run"}


def test_the_picture_has_a_bar_for_every_case(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text())
    picture = ElementTree.parse(folder / "results.svg").getroot()
    assert len(picture.findall("{*}rect")) == len(results["cases"])


def test_every_goal_can_be_met_and_missed() -> None:
    good: dict[str, Any] = {
        "seconds": 1.0, "memory_seconds": 1.0, "compute_seconds": 1.0, "gain": 9.0, "tokens": 64
    }  # fmt: skip
    bad: dict[str, Any] = {
        "seconds": 2.0, "memory_seconds": 1.0, "compute_seconds": 1.0, "gain": 0.5, "tokens": None
    }  # fmt: skip
    for goal in GOALS:
        assert goal.judge({goal.key: good})["verdict"] == "met"
        assert goal.judge({goal.key: bad})["verdict"] == "missed"
        assert goal.judge({})["verdict"] == "not run"


@pytest.mark.parametrize("storage", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_wrong_kernel_is_found_out(
    monkeypatch: pytest.MonkeyPatch, storage: torch.dtype | None
) -> None:
    backend, check = get_backend("torch"), checks.Check(2, 16, torch.float32, storage=storage)
    assert check.error(backend, torch.device("cpu")) <= 1
    right = type(backend).attend
    monkeypatch.setattr(type(backend), "attend", lambda *args: right(*args) * 1.001)
    assert check.error(backend, torch.device("cpu")) > 1


@pytest.mark.parametrize(
    "options", [{}, {"recorded": True}, {"storage": torch.int8, "recorded": True}], ids=str
)
def test_the_gpu_kernels_pass_the_check(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    # The interpreter is slow: as little as is still shared.
    monkeypatch.setattr(checks, "LENGTHS", [(1, 1), (5, 20)])
    monkeypatch.setattr(checks, "SHARED", 192)
    monkeypatch.setattr(checks, "SHARING", [(1, 193), (1, 208), (1, 225), (1, 230)])
    check = checks.Check(2, 16, torch.float32, **options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert check.error(get_backend("triton"), device) <= 1


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_steps_beside_attention_pass_the_check(name: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert OpsCheck(torch.float32).error(get_backend(name), device) <= 1


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize(
    "check", [CopiesCheck(torch.int8), MasksCheck(), SwapsCheck(torch.int8, 9)]
)
def test_what_moves_passes_the_check(
    monkeypatch: pytest.MonkeyPatch, name: str, check: Any
) -> None:
    monkeypatch.setattr(moves_check, "BLOCK", (4, 2, 16))  # the interpreter is slow
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert check.error(get_backend(name), device) == 0


def test_blocks_in_wrong_places_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, device = get_backend("torch"), torch.device("cpu")
    monkeypatch.setattr(type(backend), "copy_blocks", lambda self, caches, pairs: None)
    assert CopiesCheck(torch.float32).error(backend, device) > 1
    monkeypatch.setattr(PlainHostPool, "swap_in", lambda self, pairs: None)
    assert SwapsCheck(torch.float32, 9).error(backend, device) > 1


def test_a_mask_that_forbids_too_little_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves_check, "apply_masks", lambda logits, rows, bits: None)
    assert MasksCheck().error(get_backend("torch"), torch.device("cpu")) > 1


def test_recorded_steps_pass_the_check_and_wrong_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    check, backend = ReplayCheck(dtype), get_backend("triton")
    monkeypatch.setattr(step_checks, "PROMPTS", (3, 17))  # the interpreter is slow
    monkeypatch.setattr(step_checks, "DECODES", 2)
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
    monkeypatch.setattr(step_checks, "SHAPE", step_checks.SHAPE | small)
    assert check.error(backend, device) <= 1
    run = DecodeGraphs.run

    def shifted(self: DecodeGraphs, batch: Any) -> Any:
        logits = run(self, batch)
        return None if logits is None else logits * 1.1

    monkeypatch.setattr(DecodeGraphs, "run", shifted)
    assert check.error(backend, device) > 1


@pytest.mark.parametrize("operation", ["rms_norm", "add_rms_norm", "gated"])
def test_a_wrong_step_beside_attention_is_found_out(
    monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    backend = get_backend("torch")
    right = getattr(backend.ops, operation)

    def wrong(*args: Any) -> Any:
        out = right(*args)
        return tuple(1.001 * each for each in out) if isinstance(out, tuple) else 1.001 * out

    monkeypatch.setattr(backend, "ops", TorchLayerOps())
    monkeypatch.setattr(backend.ops, operation, wrong)
    assert OpsCheck(torch.float32).error(backend, torch.device("cpu")) > 1
