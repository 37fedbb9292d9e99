"""All that can be found out about a server before it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ragcache.config import ServeSettings
from ragcache.doctor.advice import Advice, advice
from ragcache.doctor.machine import Machine, versions
from ragcache.doctor.plan import Plan, make_plan
from ragcache.doctor.redis import RedisState, ask
from ragcache.errors import ConfigError
from ragcache.gateway.tenants import Tenants, read_keys

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`problems` keep a server from starting, `warnings` make it slow."""

    versions: dict[str, str | None]
    machine: Machine
    plan: Plan | None
    redis: RedisState | None
    problems: list[str]
    warnings: list[Advice]


def diagnose(settings: ServeSettings) -> Diagnosis:
    """Everything that can be known without loading the weights."""
    problems: list[str] = []

    def attempt(work: Callable[[], T]) -> T | None:
        try:
            return work()
        except ConfigError as error:
            problems.append(str(error))
            return None

    attempt(lambda: _check_keys(settings))
    plan = attempt(lambda: make_plan(settings))
    redis = attempt(lambda: _ask_redis(settings))
    machine = Machine.look()
    warnings = advice(settings, machine, plan) if plan else []
    if redis is not None and redis.error is not None:
        problem = f"{redis.server} does not answer ({redis.error}): this replica stands alone"
        warnings.append(Advice(problem, "start it, or correct --redis-url"))
    return Diagnosis(versions(), machine, plan, redis, problems, warnings)


def _check_keys(settings: ServeSettings) -> None:
    file = settings.api_keys_file
    Tenants([*settings.api_key, *(read_keys(file) if file is not None else ())])


def _ask_redis(settings: ServeSettings) -> RedisState | None:
    if settings.redis_url is None:
        return None
    return asyncio.run(ask(settings.redis_url, settings.cluster_name))
