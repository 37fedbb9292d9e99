"""What would make a server slow, each with what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ragcache.config import ServeSettings
from ragcache.doctor.machine import Machine
from ragcache.doctor.plan import Plan


@dataclass(frozen=True, slots=True)
class Advice:
    """A slow path, and the way off it."""

    problem: str
    remedy: str


def advice(settings: ServeSettings, machine: Machine, plan: Plan) -> list[Advice]:
    """All that applies to a server with this plan."""
    if plan.device == "cuda":
        of_device = [_triton(plan)]
    else:
        of_device = [
            _unused_gpu(settings, machine),
            _threads(machine),
            _native(machine, plan),
            _only_for_gpus(settings),
        ]
    return [each for rule in (*of_device, _dtype(plan), _cache(settings, plan)) for each in rule]


def _triton(plan: Plan) -> Iterator[Advice]:
    if plan.backend == "triton":
        return
    reason = plan.others["triton"]
    if plan.dtype == "float32":
        remedy = "--dtype auto"
    elif "Triton" in reason:
        remedy = "pip install 'triton>=3.6'"
    else:
        remedy = "it takes another GPU or model"
    yield Advice(f"attention runs in plain torch, not in triton: {reason}", remedy)


def _unused_gpu(settings: ServeSettings, machine: Machine) -> Iterator[Advice]:
    if settings.device == "auto" and machine.nvidia_driver and not machine.gpus:
        yield Advice(
            "there is an NVIDIA driver, but this torch sees no CUDA device",
            "install the build of PyTorch that fits the driver, and check CUDA_VISIBLE_DEVICES",
        )


def _threads(machine: Machine) -> Iterator[Advice]:
    threads, cores = machine.threads, machine.cores
    useful = max(1, int(min(cores, machine.physical_cores or cores)))
    if threads > max(1, cores):
        yield Advice(
            f"{threads} threads share {cores:g} cores and wait for each other",
            f"set OMP_NUM_THREADS={useful}",
        )
    elif threads < useful:
        said = "OMP_NUM_THREADS" in os.environ
        yield Advice(
            f"{threads} of {useful} cores compute",
            "unset OMP_NUM_THREADS" if said else f"set OMP_NUM_THREADS={useful}",
        )


def _native(machine: Machine, plan: Plan) -> Iterator[Advice]:
    native = machine.native
    if reason := plan.others.get("native"):
        if native.missing is None:
            remedy = "it takes another model or dtype"
        elif native.supported:
            remedy = "unset RAGCACHE_ISA"
        else:
            remedy = "install a C compiler, such as gcc, and then ragcache again"
        yield Advice(f"attention runs in plain torch: {reason}", remedy)
    elif native.tier and native.tier != native.supported[-1]:
        yield Advice(
            f"RAGCACHE_ISA forces {native.tier} where {native.supported[-1]} could run",
            "unset RAGCACHE_ISA",
        )


def _only_for_gpus(settings: ServeSettings) -> Iterator[Advice]:
    if settings.kv_cache_dtype == "fp8":
        yield Advice("a CPU is slow at widening fp8", "--kv-cache-dtype int8")
    if settings.tensor_parallel_size > 1:
        yield Advice(
            "ranks share the cores of a CPU, and are no faster than one",
            "--tensor-parallel-size 1",
        )


def _dtype(plan: Plan) -> Iterator[Advice]:
    if plan.dtype == "float32" != plan.auto_dtype:
        yield Advice(
            f"float32 moves twice the bytes of {plan.auto_dtype}, which is fast here",
            "--dtype auto",
        )
    elif plan.device == "cpu" and plan.dtype != plan.auto_dtype:
        yield Advice(
            f"this processor has no instructions for {plan.dtype}, so all of it is converted",
            "--dtype auto",
        )


def _cache(settings: ServeSettings, plan: Plan) -> Iterator[Advice]:
    if not settings.prefix_caching:
        yield Advice("prompts share nothing", "--prefix-caching")
    if plan.kv_tokens < plan.max_model_len:
        yield Advice(
            f"the KV pool holds {plan.kv_tokens:,} tokens, less than the {plan.max_model_len:,} of "
            "the longest request",
            "a larger --kv-cache-memory, a smaller --max-model-len, or --kv-cache-dtype int8",
        )
