"""`ragcache doctor`: the diagnosis as text, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ragcache.config import ServeSettings
from ragcache.doctor.diagnosis import Diagnosis, diagnose
from ragcache.doctor.machine import Machine, Native
from ragcache.doctor.plan import Plan
from ragcache.doctor.redis import RedisState

Row = tuple[str, str]
ORIGINS = {"hub": "not downloaded yet", "embedded": "not unpacked yet", "GGUF": "not unpacked yet"}


def run(settings: ServeSettings, *, as_json: bool) -> int:
    """Print the diagnosis; returns 0, or 1 for settings with which nothing can be served."""
    found = diagnose(settings)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        Console().print(render(found))
    return 1 if found.problems else 0


def render(found: Diagnosis) -> RenderableType:
    """What would run, then what keeps it from running, then what makes it slow."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    for name, value in _rows(found):
        table.add_row(name, Text(value))
    parts: list[RenderableType] = [table]
    parts += [Text(f"\nCannot serve: {problem}", style="red") for problem in found.problems]
    for each in found.warnings:
        parts += [Text(f"\nWarning: {each.problem}", style="yellow"), Text(f"  → {each.remedy}")]
    return Group(*parts)


def _rows(found: Diagnosis) -> Iterator[Row]:
    yield "versions", ", ".join(f"{name} {v or 'none'}" for name, v in found.versions.items())
    yield from _machine(found.machine)
    if found.plan is not None:
        yield from _plan(found.plan)
    if found.redis is not None:
        yield "redis", _redis(found.redis)


def _machine(machine: Machine) -> Iterator[Row]:
    yield "processor", f"{machine.cpu}, {machine.cores:g} cores to use"
    yield "threads", f"{machine.threads}"
    yield "memory", f"{_gib(machine.memory)} free"
    if machine.gpus:
        yield "GPUs", ", ".join(machine.gpus)
    yield "C kernels", _native(machine.native)


def _native(native: Native) -> str:
    if native.missing is not None:
        return f"none: {native.missing}"
    why = "forced by RAGCACHE_ISA" if native.forced else "the best that this processor runs"
    return f"{native.tier}, {why} (of {', '.join(native.supported)})"


def _plan(plan: Plan) -> Iterator[Row]:
    model = plan.model
    missing = "" if model.ready else f", {ORIGINS[model.origin]}"
    yield "model", f"{model.name} ({model.origin}{missing}), {model.location}"
    yield "device", plan.device
    yield "dtype", f"{plan.dtype}: {plan.dtype_reason}"
    yield "attention", plan.backend
    for name, reason in plan.others.items():
        yield f"  not {name}", reason
    if plan.quantization is not None:
        yield "quantization", f"products in {plan.quantization}, the embedding in {plan.dtype}"
    yield "weights", _gib(plan.weights)
    tokens = f"{plan.kv_tokens:,} tokens in {plan.kv_dtype}"
    yield "KV pool", f"about {tokens}; a request has at most {plan.max_model_len:,}"
    drafts = f"up to {plan.max_draft} tokens" if plan.max_draft else "none"
    yield "drafts", f"{drafts}: {plan.draft_reason}"


def _redis(state: RedisState) -> str:
    if state.error is not None:
        return f"{state.server} does not answer"
    return f"{state.server} answers; replicas that live there: {state.replicas}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
