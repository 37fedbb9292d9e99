"""`ragcache bench compare`: the same agents against ragcache and its peers, turn and turn about.

Every server answers the same text, one server after the other, so that none takes another's cores.
The order rotates from round to round, and each round and concurrency has text that nobody has in a
cache. A peer that fails is told, and the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
from rich.console import RenderableType
from rich.progress import Progress, TaskID

from ragcache.bench.client import ChatClient, RequestFailed, bearer, first_model
from ragcache.bench.comparison import Comparison, Failure, Played, standings
from ragcache.bench.figures import RunFigures, summarise
from ragcache.bench.load import Load
from ragcache.bench.options import OURS, CompareBench
from ragcache.bench.progress import progress
from ragcache.bench.tables import contest
from ragcache.bench.workload import Workload, WorkloadShape, make_workload


def run(options: CompareBench) -> dict[str, Any]:
    """All figures, see `Comparison`; raises RequestFailed where ragcache itself fails."""
    return asyncio.run(measure(options)).model_dump(mode="json")


def render(results: dict[str, Any]) -> RenderableType:
    """The ratios as a table."""
    return contest(Comparison.model_validate(results))


async def measure(options: CompareBench) -> Comparison:
    """Play all rounds; raises as `run` does."""
    timeout = aiohttp.ClientTimeout(total=options.request_timeout, sock_connect=10)
    async with aiohttp.ClientSession(timeout=timeout, headers=bearer(options.api_key)) as http:
        with progress() as shown:
            return await _Contest(options, http, shown).run()


@dataclass(frozen=True, slots=True)
class Turn:
    """What one server plays next; the text is that of the seed."""

    round: int
    concurrency: int
    server: str
    seed: int


def turns(options: CompareBench) -> Iterator[Turn]:
    """All of them, in the order in which they are played."""
    servers = [OURS, *options.peer]
    for index in range(options.rounds):
        first = index % len(servers)
        for place, concurrency in enumerate(options.concurrency):
            seed = options.seed + index * len(options.concurrency) + place
            for server in (*servers[first:], *servers[:first]):
                yield Turn(index, concurrency, server, seed)


def new_text(shape: WorkloadShape, seed: int) -> Workload:
    """A workload that differs from those of other seeds from its first words on."""
    workload = make_workload(shape, seed)
    return replace(workload, system=f"Archive number {seed}.\n\n{workload.system}")


class _Contest:
    """One comparison."""

    def __init__(self, options: CompareBench, http: aiohttp.ClientSession, shown: Progress) -> None:
        self._options = options
        self._http = http
        self._shown = shown
        self._shape = WorkloadShape(options.sessions, options.turns, options.passages)
        self._clients: dict[str, ChatClient] = {}
        self._failures: list[Failure] = []

    async def run(self) -> Comparison:
        for name, url in {OURS: self._options.url, **self._options.peer}.items():
            await self._meet(name, url.rstrip("/"))
        due = [turn for turn in turns(self._options) if turn.server in self._clients]
        total = len(due) * self._options.sessions * self._options.turns
        task = self._shown.add_task("", total=total)
        played = [each for turn in due if (each := await self._play(turn, task))]
        return Comparison(
            models={name: client.model for name, client in self._clients.items()},
            options=self._options.model_dump(mode="json"),
            standings=list(standings(played)),
            failures=self._failures,
            played=played,
        )

    async def _meet(self, name: str, url: str) -> None:
        """Ask a server for its model, and for an answer, which warms it up."""
        try:
            model = await first_model(self._http, url)
            client = await self._warm(name, ChatClient(self._http, url, model, self._options.extra))
        except RequestFailed as error:
            self._failed(Failure(server=name, error=str(error)))
        else:
            self._clients[name] = client

    async def _warm(self, name: str, client: ChatClient) -> ChatClient:
        """A client that the server answers: without `extra`, where only that is refused."""
        one = WorkloadShape(sessions=1, turns=1, passages=self._options.passages)
        text = new_text(one, self._options.seed - 1)
        try:
            await self._load(client, 1).play(text)
        except RequestFailed as refusal:
            if not client.extra:
                raise
            client = replace(client, extra={})
            await self._load(client, 1).play(text)
            self._failed(Failure(server=name, turn="the request with --extra", error=str(refusal)))
        return client

    async def _play(self, turn: Turn, task: TaskID) -> Played | None:
        """The figures of a turn; None for a peer that failed."""
        what = f"round {turn.round + 1}, {turn.concurrency} at once: {turn.server}"
        self._shown.update(task, description=what)
        try:
            figures = await self._figures(turn, lambda: self._shown.advance(task))
        except RequestFailed as error:
            self._failed(Failure(server=turn.server, turn=what, error=str(error)))
            return None
        return Played(
            server=turn.server, round=turn.round, concurrency=turn.concurrency, figures=figures
        )

    async def _figures(self, turn: Turn, on_reply: Callable[[], None]) -> RunFigures:
        load = self._load(self._clients[turn.server], turn.concurrency, on_reply)
        exchanges, wall = await load.play(new_text(self._shape, turn.seed))
        return summarise([each.reply for each in exchanges], wall, None)

    def _load(
        self, client: ChatClient, concurrency: int, on_reply: Callable[[], None] = lambda: None
    ) -> Load:
        return Load(client, concurrency, self._options.max_tokens, lambda: None, on_reply)

    def _failed(self, failure: Failure) -> None:
        """Raise if it is ragcache's: without it there is nothing to compare with."""
        if failure.server == OURS:
            raise RequestFailed(f"{OURS}: {failure.error}")
        self._failures.append(failure)
