"""The tuner's search and table, without a GPU; and its workloads in the interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ragcache_kernels.bench.layer import Heads, Layer
from ragcache_kernels.quantise import LIMITS
from ragcache_kernels.reference import reference_attention
from ragcache_kernels.triton import configs
from ragcache_kernels.triton.backend import TritonBackend
from ragcache_kernels.triton.configs import Case, Config, Phase, choose, default, read_table
from ragcache_kernels.triton.tune import (
    RECORDED,
    Refused,
    Workload,
    candidates,
    main,
    merged,
    search,
    write_table,
)

CASE = Case(90, 128, 4, "torch.bfloat16", Phase.NARROW)
OTHER = CASE._replace(phase=Phase.WIDE)
FAST = Config(16, 128, 4, 3)


def test_the_fastest_candidate_is_found() -> None:
    ratios = {FAST: 0.8, Config(16, 32, 2, 2): 0.9}
    assert search(CASE, lambda _, config: ratios.get(config, 1.2)) == FAST


def test_a_gain_that_may_be_chance_leaves_the_default() -> None:
    assert search(CASE, lambda _, config: 0.98 if config == FAST else 1.2) is None


def test_a_refused_candidate_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    second = Config(16, 32, 2, 2)

    def compare(_: Case, config: Config) -> float:
        if config == FAST:
            raise Refused("its registers spill")
        return 0.9 if config == second else 1.2

    assert search(CASE, compare) == second
    assert "refused, its registers spill" in capsys.readouterr().out


@pytest.mark.parametrize("phase", Phase)
def test_candidates_have_the_rows_of_the_default_and_are_not_the_default(phase: Phase) -> None:
    case = CASE._replace(phase=phase)
    found = list(candidates(case))
    assert len(found) == len(set(found)) > 20
    assert {config.bm for config in found} == {default(case).bm}
    assert default(case) not in found


def test_new_findings_replace_old_ones_and_a_best_default_needs_no_entry() -> None:
    old, new = Config(16, 32, 4, 2), FAST
    third = CASE._replace(dim=64)
    found = merged({CASE: old, OTHER: old, third: old}, {CASE: new, OTHER: None})
    assert found == {CASE: new, third: old}


@pytest.mark.parametrize("table", [{}, {CASE: FAST, OTHER: Config(128, 32, 8, 2)}], ids=len)
def test_a_table_is_read_as_it_was_written(tmp_path: Path, table: dict[Case, Config]) -> None:
    path = tmp_path / "tuned.json"
    write_table(path, table)
    assert read_table(path) == table
    assert len(json.loads(path.read_text())) == len(table)


def test_what_was_tuned_goes_before_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuned.json"
    write_table(path, {CASE: FAST})
    monkeypatch.setattr(configs, "_tuned", lambda: read_table(path))
    assert choose(CASE) == FAST != default(CASE)
    assert choose(OTHER) == default(OTHER)


@pytest.mark.parametrize("storage", [None, *LIMITS], ids=str)
@pytest.mark.parametrize("phase", Phase)
def test_the_workloads_run_the_phase_they_are_for_with_the_given_configuration(
    phase: Phase, storage: torch.dtype | None
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload = Workload(rows=20, length=100, chunk=80)
    asked = set()

    def table(case: Case) -> Config:
        asked.add((case.phase, case.dtype))
        standard = default(case)
        return Config(standard.bm, 16, 4, 2) if case.phase is phase else standard

    backend = TritonBackend(table)
    layer = Layer(backend, Heads(2, 1, 16), workload.blocks, device, torch.float32)
    if storage is not None:
        layer.cache = layer.quantised_cache(storage)
    step = workload.layout(phase)
    query = layer.queries(len(step.slot_mapping))
    way = workload.recorded if phase in RECORDED else workload.call
    out = way(layer, backend, query, step)()
    assert (phase, str(storage or torch.float32)) in asked
    assert isinstance(out, torch.Tensor)
    cache = type(layer.cache)(*(tensor.cpu() for tensor in layer.cache.tensors))
    expected = reference_attention(query.cpu(), cache, step, layer.spec)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_tuner_says_so() -> None:
    with pytest.raises(SystemExit, match="torch finds no CUDA device"):
        main(["--dims", "64"])
