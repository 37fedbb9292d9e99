"""The plan is what `serve` does, found without its weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from ragcache_kernels import PREFERENCE
from ragcache_kernels.native.library import supported_tiers

from ragcache.bench.settings import apart
from ragcache.doctor import model as doctor_model
from ragcache.doctor.model import locate
from ragcache.doctor.plan import make_plan
from ragcache.engine import fast_decoder, machine
from ragcache.engine.source import gguf_file
from ragcache.errors import ConfigError
from ragcache.loading import load_runner

needs_native = pytest.mark.skipif(not supported_tiers(), reason="the C kernels were not built")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_is_what_is_run(tiny_llama, dtype):
    settings = apart(model=str(tiny_llama), dtype=dtype, kv_cache_memory=1 << 20)
    plan, loaded = make_plan(settings), load_runner(settings, lambda: None)
    assert plan.backend == loaded.runner._backend.name
    assert plan.kv_tokens == loaded.num_blocks * settings.block_size
    assert plan.dtype == plan.kv_dtype == dtype
    assert plan.max_draft == (settings.speculative_tokens if loaded.runner.exact else 0)
    loaded.runner.close()


def test_every_other_backend_has_a_reason(tiny_llama):
    plan = make_plan(apart(model=str(tiny_llama)))
    assert {plan.backend, *plan.others} == set(PREFERENCE)
    assert all(plan.others.values())


@needs_native
def test_drafts_are_where_they_change_no_answer(tiny_llama, monkeypatch):
    def drafts(**options):
        found = make_plan(apart(model=str(tiny_llama), **options))
        return found.max_draft, found.draft_reason

    assert drafts()[0] == 8
    assert drafts(speculative_tokens=3)[0] == 3
    assert drafts(speculative_tokens=0) == (0, "asked for")
    assert drafts(dtype="float16") == (0, "in torch a token may depend on what it is computed with")
    assert drafts(tensor_parallel_size=2) == (0, "not tested with several ranks")
    monkeypatch.setattr(fast_decoder, "FAMILIES", set())
    assert drafts() == (0, "of a llama model torch computes a part")


def test_a_gguf_file_is_read_where_it_is_not_unpacked_yet(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = locate(None)
    assert (found.origin, found.ready) == ("embedded", False)
    assert found.location == str(gguf_file(None))
    config = {"model_type": "llama", "num_hidden_layers": 1}
    read = doctor_model.AutoConfig.for_model(**config)
    monkeypatch.setattr(doctor_model.AutoConfig, "from_pretrained", lambda *_, **__: read)
    assert doctor_model.read_config(found) is read
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "./nowhere"}, "no folder"),
        ({"model": "./nowhere.gguf"}, "no GGUF file"),
        ({"max_model_len": 1 << 40}, "max_model_len"),
        ({"kv_cache_memory": 1}, "hold no block"),
        ({"tensor_parallel_size": 3}, "does not divide"),
        ({"quantization": "int8", "dtype": "float16"}, "quantization: .* runs on torch"),
    ],
)
def test_what_cannot_be_served_is_said_as_serve_says_it(options, message, tiny_llama):
    with pytest.raises(ConfigError, match=message):
        make_plan(apart(**{"model": str(tiny_llama), **options}))


def test_a_folder_without_weights_cannot_be_served(tiny_llama, tmp_path):
    shutil.copytree(tiny_llama, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ConfigError, match="no weights"):
        make_plan(apart(model=str(tmp_path / "m")))


def test_an_unsupported_model_cannot_be_served(tiny_llama, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(ConfigError, match="mamba"):
        make_plan(apart(model=str(folder)))


def test_weights_beyond_the_memory_cannot_be_served(tiny_llama, monkeypatch):
    monkeypatch.setattr("ragcache.doctor.plan.free_memory", lambda _: 1 << 20)
    with pytest.raises(ConfigError, match=r"its weights take \d+ MiB, 1 are free"):
        make_plan(apart(model=str(tiny_llama)))


@pytest.mark.parametrize(
    ("quota", "cores"), [("50000 100000", 0.5), ("150000 100000", 1.5), ("max 100000", None)]
)
def test_the_cores_are_no_more_than_the_container_may_use(quota, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1})
    assert machine.usable_cores() == 2
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert machine.usable_cores() == (2 if cores is None else cores)


def test_the_memory_is_no_more_than_the_container_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    cpu = torch.device("cpu")
    whole = machine.free_memory(cpu)
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory(cpu) > 0.5 * whole > 1000
    (tmp_path / "memory.max").write_text("1500\n")
    assert machine.free_memory(cpu) == 500
