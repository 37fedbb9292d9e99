"""`ragcache serve`, `route`, `doctor` and `bench`; every option is a field of a settings class."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSubCommand,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from ragcache import logs
from ragcache.bench.options import (
    ChaosBench,
    CompareBench,
    EngineBench,
    GatewayBench,
    KernelsBench,
    LangchainBench,
    PrefixBench,
    QualityBench,
    ReportBench,
    RoutingBench,
    ScalingBench,
    ServeBench,
)
from ragcache.config import RouteSettings, ServerSettings, ServeSettings
from ragcache.errors import ConfigError, RagcacheError

if TYPE_CHECKING:
    from ragcache.gateway.membership import Membership
    from ragcache.gateway.route.following import Following
    from ragcache.gateway.route.reading import Encode
    from ragcache.gateway.tracing import Tracer
    from ragcache.serving import Serving

T = TypeVar("T")


class Serve(ServeSettings):
    """Serve a model with a shared prefix cache over an OpenAI-compatible API."""

    def cli_cmd(self) -> None:
        """Answer from the first second, load the model meanwhile, end at a signal."""
        logs.configure(self.log_level, self.log_format)
        asyncio.run(_serve(self))


class Route(RouteSettings):
    """Forward to replicas, each request to the one that has most of its prompt cached."""

    def cli_cmd(self) -> None:
        """Answer from the first second, until a signal."""
        logs.configure(self.log_level, self.log_format)
        asyncio.run(_route(self))


class Doctor(ServeSettings):
    """Say what `serve` would run with the same options, why, and what would make it slow."""

    as_json: bool = Field(False, validation_alias="json", description="print an object")

    def cli_cmd(self) -> None:
        """Print the diagnosis; ends with status 1 if nothing can be served."""
        from ragcache.doctor.report import run

        sys.exit(run(self, as_json=self.as_json))

    @classmethod
    def settings_customise_sources(
        cls, *_: Any, **sources: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Variables and the file are those of `serve`: `json` is a flag only."""
        sources["env_settings"] = EnvSettingsSource(ServeSettings)
        return super().settings_customise_sources(ServeSettings, **sources)


class Bench(BaseModel):
    """Measure; every benchmark has a control in the same run."""

    serve: CliSubCommand[ServeBench]
    prefix: CliSubCommand[PrefixBench]
    engine: CliSubCommand[EngineBench]
    gateway: CliSubCommand[GatewayBench]
    kernels: CliSubCommand[KernelsBench]
    langchain: CliSubCommand[LangchainBench]
    quality: CliSubCommand[QualityBench]
    report: CliSubCommand[ReportBench]
    chaos: CliSubCommand[ChaosBench]
    routing: CliSubCommand[RoutingBench]
    compare: CliSubCommand[CompareBench]
    scaling: CliSubCommand[ScalingBench]

    def cli_cmd(self) -> None:
        """Run the chosen benchmark."""
        CliApp.run_subcommand(self)


class Ragcache(BaseSettings):
    """A gateway with its own PagedAttention engine that prefills shared prefixes once."""

    model_config = SettingsConfigDict(
        cli_prog_name="ragcache",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    serve: CliSubCommand[Serve]
    route: CliSubCommand[Route]
    doctor: CliSubCommand[Doctor]
    bench: CliSubCommand[Bench]

    def cli_cmd(self) -> None:
        """Run the chosen command."""
        CliApp.run_subcommand(self)


def main() -> None:
    """The console script; exits with 2 for a wrong option, with 1 for a failure later on."""
    # Before torch is imported: its threads wait for each other asleep. Spinning, the default, gains
    # some percent on an idle machine and is several times slower as soon as anything else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Blocks of KV lie all over the pool: with huge pages a core reads them a fourth faster.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        CliApp.run(Ragcache)
    except ValidationError as error:
        sys.exit(_complain(_describe(error), status=2))
    except ConfigError as error:
        sys.exit(_complain(str(error), status=2))
    except RagcacheError as error:
        sys.exit(_complain(str(error), status=1))
    except KeyboardInterrupt:  # a second one, while the first is ending the work
        sys.exit(130)


async def _serve(settings: ServeSettings) -> None:
    from ragcache.gateway.app import create_app, serve
    from ragcache.gateway.backend import BACKEND

    keys, tracer = _keys(settings), _tracer(settings)
    membership = _membership(settings)

    def load() -> Serving:
        from ragcache.loading import load_serving  # importing it takes seconds, too

        return load_serving(settings, membership.outbox if membership else None)

    loading = _in_thread(load)
    app = create_app(
        loading,
        api_keys=keys,
        max_body_size=int(settings.max_body_size),
        metrics_compat=settings.metrics_compat,
        tracer=tracer,
    )
    if membership is not None:
        membership.join(app)
    try:
        await serve(app, loading, settings.host, settings.port, settings.drain_timeout)
    finally:
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        if (serving := app[BACKEND].loaded) is not None:
            await asyncio.to_thread(serving.close)


def _membership(settings: ServeSettings) -> Membership | None:
    if settings.redis_url is None:
        return None
    from ragcache.gateway.membership import Membership  # only who needs Redis imports its client

    return Membership(settings.redis_url, settings)


async def _route(settings: RouteSettings) -> None:
    from ragcache.gateway.app import serve
    from ragcache.gateway.route.app import create_app

    keys, tracer = _keys(settings), _tracer(settings)
    following = _following(settings)

    def load() -> Encode | None:
        if following is None:
            return None  # prompts need not be read
        from ragcache.routing import load_encode

        return load_encode(settings.model)

    loading = _in_thread(load)
    app = create_app(
        loading,
        urls=settings.replica,
        directory=following.directory if following else None,
        api_keys=keys,
        max_body_size=int(settings.max_body_size),
        max_requests=settings.max_requests,
        tracer=tracer,
    )
    if following is not None:
        following.join(app)
    await serve(app, loading, settings.host, settings.port, settings.drain_timeout)
    if tracer is not None:
        await asyncio.to_thread(tracer.close)


def _following(settings: RouteSettings) -> Following | None:
    if settings.redis_url is None:
        return None
    from ragcache.gateway.route.following import Following

    return Following(settings.redis_url, settings.cluster_name)


def _keys(settings: ServerSettings) -> list[str]:
    from ragcache.gateway.tenants import read_keys

    file = settings.api_keys_file
    return [*settings.api_key, *(read_keys(file) if file is not None else ())]


def _tracer(settings: ServerSettings) -> Tracer | None:
    from ragcache.gateway.tracing import Tracer

    return Tracer() if settings.otel else None


def _in_thread(load: Callable[[], T]) -> asyncio.Future[T]:
    """Load on a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    loading: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            arrive = partial(loading.set_result, load())
        except Exception as error:
            arrive = partial(loading.set_exception, error)
        if not loop.is_closed():  # else a signal was faster
            loop.call_soon_threadsafe(arrive)

    threading.Thread(target=work, name="loading", daemon=True).start()
    return loading


def _complain(message: str, *, status: int) -> int:
    print(f"ragcache: {message}", file=sys.stderr)
    return status


def _describe(error: ValidationError) -> str:
    """Each problem on a line, led by the option's name without the command's."""
    problems = []
    for each in error.errors():
        name = ".".join(str(part) for part in each["loc"][1:])
        problems.append(f"{name}: {each['msg']}" if name else each["msg"])
    return "\n".join(problems)
