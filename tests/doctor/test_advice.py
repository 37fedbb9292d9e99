"""Each slow path has one warning, and a server without slow paths has none."""

from __future__ import annotations

import pytest

from ragcache.bench.settings import apart
from ragcache.doctor.advice import Advice, advice

CUDA = {"device": "cuda", "backend": "torch"}


@pytest.fixture
def advise(plan, machine):
    """The advice for plan and machine with changes, and settings."""

    def make(plans=None, machines=None, **settings) -> list[Advice]:
        return advice(apart(**settings), machine(**machines or {}), plan(**plans or {}))

    return make


def test_without_slow_paths_there_is_no_warning(advise):
    assert advise() == []
    assert advise({"device": "cuda", "backend": "triton"}, {"threads": 1, "gpus": ["H"]}) == []


@pytest.mark.parametrize(
    ("threads", "cores", "problem", "remedy"),
    [
        (8, 2.0, "8 threads share 2 cores", "OMP_NUM_THREADS=2"),
        (64, 2.5, "64 threads share 2.5 cores", "OMP_NUM_THREADS=2"),
        (2, 0.5, "2 threads share 0.5 cores", "OMP_NUM_THREADS=1"),
        (1, 8.0, "1 of 4 cores", "OMP_NUM_THREADS=4"),
    ],
)
def test_threads_fit_the_cores(threads, cores, problem, remedy, advise, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (found,) = advise(machines={"threads": threads, "cores": cores})
    assert problem in found.problem
    assert remedy in found.remedy


@pytest.mark.parametrize(("threads", "cores"), [(1, 0.5), (4, 8.0), (8, 8.0), (2, 2.0)])
def test_a_thread_for_each_core_or_each_half_of_one_is_right(threads, cores, advise):
    assert advise(machines={"threads": threads, "cores": cores}) == []


def test_the_variable_that_leaves_cores_idle_is_named(advise, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (found,) = advise(machines={"threads": 1})
    assert found.remedy == "unset OMP_NUM_THREADS"


@pytest.mark.parametrize(
    ("native", "remedy"),
    [
        ({"supported": [], "tier": None, "missing": "no compiler"}, "a C compiler"),
        ({"tier": None, "forced": True, "missing": "ISA=avx9"}, "unset RAGCACHE_ISA"),
        ({}, "another model"),
    ],
)
def test_attention_without_the_c_kernels_is_slow(native, remedy, advise):
    plan = {"backend": "torch", "others": {"native": "for a reason", "triton": "no GPU"}}
    (found,) = advise(plan, native)
    assert "for a reason" in found.problem
    assert remedy in found.remedy


def test_a_lower_tier_is_slow(advise):
    (found,) = advise(machines={"tier": "baseline", "forced": True})
    assert found == Advice(
        "RAGCACHE_ISA forces baseline where avx2 could run", "unset RAGCACHE_ISA"
    )


@pytest.mark.parametrize(
    ("dtype", "auto", "problem"),
    [
        ("bfloat16", "float32", "no instructions for bfloat16"),
        ("float16", "bfloat16", "no instructions for float16"),
        ("float32", "bfloat16", "twice the bytes of bfloat16"),
    ],
)
def test_a_dtype_that_is_slow_here_is_told(dtype, auto, problem, advise):
    (found,) = advise({"dtype": dtype, "auto_dtype": auto})
    assert problem in found.problem
    assert found.remedy == "--dtype auto"


@pytest.mark.parametrize(
    ("dtype", "reason", "remedy"),
    [
        ("bfloat16", "it takes Triton 3.6 or later, and this is 3.5.1", "triton>=3.6"),
        ("float16", "it is for heads of up to 256 elements", "another GPU or model"),
        ("float32", "it is for float16 and bfloat16", "--dtype auto"),
    ],
)
def test_a_gpu_without_our_kernels_is_slow(dtype, reason, remedy, advise):
    found = advise({**CUDA, "dtype": dtype, "others": {"triton": reason}})[0]
    assert reason in found.problem
    assert remedy in found.remedy


def test_a_gpu_that_torch_does_not_see_is_told_unless_the_cpu_was_asked_for(advise):
    (found,) = advise(machines={"nvidia_driver": True})
    assert "no CUDA device" in found.problem
    assert advise(machines={"nvidia_driver": True}, device="cpu") == []


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"kv_cache_dtype": "fp8"}, "int8"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 1"),
        ({"prefix_caching": False}, "--prefix-caching"),
    ],
)
def test_options_that_cost_time_on_a_cpu_are_told(settings, remedy, advise):
    (found,) = advise(**settings)
    assert remedy in found.remedy


def test_a_pool_that_cannot_hold_the_longest_request_is_told(advise):
    (found,) = advise({"kv_tokens": 4096})
    assert "4,096 tokens, less than the 8,192" in found.problem
