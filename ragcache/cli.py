"""`ragcache serve` and `ragcache bench`; every option is a field of a settings class."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSubCommand, SettingsConfigDict

from ragcache.bench.options import (
    ChaosBench,
    EngineBench,
    GatewayBench,
    KernelsBench,
    LangchainBench,
    PrefixBench,
    ReportBench,
    RoutingBench,
    ServeBench,
)
from ragcache.config import ServeSettings
from ragcache.errors import ConfigError, RagcacheError

if TYPE_CHECKING:
    from ragcache.gateway.membership import Membership
    from ragcache.serving import Serving


class Serve(ServeSettings):
    """Serve a model with a shared prefix cache over an OpenAI-compatible API."""

    def cli_cmd(self) -> None:
        """Answer from the first second, load the model meanwhile, end at a signal."""
        logging.basicConfig(
            level=self.log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
        )
        asyncio.run(_serve(self))


class Bench(BaseModel):
    """Measure; every benchmark has a control in the same run."""

    serve: CliSubCommand[ServeBench]
    prefix: CliSubCommand[PrefixBench]
    engine: CliSubCommand[EngineBench]
    gateway: CliSubCommand[GatewayBench]
    kernels: CliSubCommand[KernelsBench]
    langchain: CliSubCommand[LangchainBench]
    report: CliSubCommand[ReportBench]
    chaos: CliSubCommand[ChaosBench]
    routing: CliSubCommand[RoutingBench]

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
    bench: CliSubCommand[Bench]

    def cli_cmd(self) -> None:
        """Run the chosen command."""
        CliApp.run_subcommand(self)


def main() -> None:
    """The console script; exits with 2 for a wrong option, with 1 for a failure later on."""
    # Before torch is imported: its threads wait for each other asleep. Spinning, the default, gains
    # some percent on an idle machine and is several times slower as soon as anything else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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

    membership = _membership(settings)
    loading = _load(settings, membership)
    app = create_app(
        loading,
        api_keys=settings.api_key,
        max_body_size=int(settings.max_body_size),
        metrics_compat=settings.metrics_compat,
    )
    if membership is not None:
        membership.join(app)
    await serve(app, settings.host, settings.port)
    if loading.done():
        await asyncio.to_thread(loading.result().close)


def _membership(settings: ServeSettings) -> Membership | None:
    if settings.redis_url is None:
        return None
    from ragcache.gateway.membership import Membership  # only who needs Redis imports its client

    return Membership(settings.redis_url, settings)


def _load(settings: ServeSettings, membership: Membership | None) -> asyncio.Future[Serving]:
    """Load on a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    loading: asyncio.Future[Serving] = loop.create_future()

    def work() -> None:
        try:
            from ragcache.loading import load_serving  # importing it takes seconds, too

            sink = membership.outbox if membership else None
            arrive = partial(loading.set_result, load_serving(settings, sink))
        except Exception as error:
            arrive = partial(loading.set_exception, error)
        if not loop.is_closed():  # else a signal was faster than the model
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
