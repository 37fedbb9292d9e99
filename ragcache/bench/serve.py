"""`ragcache bench serve`: hit rate, latency and throughput of a server under an agentic-RAG load.

Works against any OpenAI-compatible server that streams and reports usage.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
from rich.console import RenderableType
from rich.progress import Progress

from ragcache.bench.client import ChatClient, bearer, first_model
from ragcache.bench.figures import ProbeFigures, Results, RunFigures, summarise
from ragcache.bench.ideal import ideal_hits
from ragcache.bench.load import Exchange, Load
from ragcache.bench.options import ServeBench
from ragcache.bench.probe import Probe
from ragcache.bench.progress import progress
from ragcache.bench.tables import report
from ragcache.bench.tokens import ChatTokenizer
from ragcache.bench.workload import Workload, WorkloadShape, make_workload


def run(options: ServeBench) -> dict[str, Any]:
    """All figures, see `Results`.

    Raises RequestFailed when the server cannot be reached or does not answer a request, and
    ConfigError when the tokenizer cannot be loaded.
    """
    return asyncio.run(measure(options)).model_dump(mode="json")


def render(results: dict[str, Any]) -> RenderableType:
    """The figures as tables."""
    return report(Results.model_validate(results))


async def measure(options: ServeBench) -> Results:
    """Probe, workload and control against the server at `options.url`; raises as `run` does."""
    tokenizer = await asyncio.to_thread(ChatTokenizer.load, options.tokenizer)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    url = options.url.rstrip("/")
    async with aiohttp.ClientSession(timeout=timeout, headers=bearer(options.api_key)) as http:
        model = options.model or await first_model(http, url)
        extra = {"ignore_eos": True} if options.ignore_eos else {}
        client = ChatClient(http, url, model, extra)
        with progress() as shown:
            return await _Benchmark(options, client, tokenizer, shown).run()


class _Benchmark:
    """One benchmark of one server."""

    def __init__(
        self,
        options: ServeBench,
        client: ChatClient,
        tokenizer: ChatTokenizer,
        progress: Progress,
    ) -> None:
        self.options = options
        self.client = client
        self.tokenizer = tokenizer
        self.progress = progress
        self.run_salt = secrets.token_hex(8) if options.salt else None

    async def run(self) -> Results:
        """The parts one after the other, so that none disturbs another."""
        options = self.options
        await self.client.ask([{"role": "user", "content": "Hello."}], 1, self._unique_salt())
        probe = await self._probe() if options.probe_tokens else None
        shape = WorkloadShape(options.sessions, options.turns, options.passages)
        workload = make_workload(shape, options.seed)
        exchanges, figures, notes = await self._play("workload", workload, lambda: self.run_salt)
        control, same = None, None
        if options.control:
            others, control, _ = await self._play("control", workload, self._unique_salt)
            same = same_answers(exchanges, others)
        return Results(
            url=self.client.url,
            model=self.client.model,
            options=options.model_dump(mode="json"),
            run=figures,
            control=control,
            same_answers=same,
            probe=probe,
            notes=notes,
        )

    def _unique_salt(self) -> str | None:
        return secrets.token_hex(8) if self.options.salt else None

    async def _play(
        self, title: str, workload: Workload, salt: Callable[[], str | None]
    ) -> tuple[list[Exchange], RunFigures, tuple[str, ...]]:
        on_reply = self._track(title, self.options.sessions * self.options.turns)
        load = Load(self.client, self.options.concurrency, self.options.max_tokens, salt, on_reply)
        exchanges, wall = await load.play(workload)
        ideal, notes = await asyncio.to_thread(
            ideal_tokens, exchanges, self.tokenizer, self.options.block_size
        )
        return exchanges, summarise([e.reply for e in exchanges], wall, ideal), notes

    async def _probe(self) -> ProbeFigures:
        unique = self._unique_salt if self.options.salt else None
        repeats = self.options.probe_repeats
        on_reply = self._track("probe", repeats * (5 if unique else 4))
        probe = Probe(
            self.client,
            lambda messages: len(self.tokenizer.prompt_ids(messages)),
            self.options.probe_tokens,
            lambda: self.run_salt,
            unique,
            on_reply,
        )
        return await probe.run(random.Random(self.options.seed), repeats)

    def _track(self, title: str, total: int) -> Callable[[], None]:
        task = self.progress.add_task(title, total=total)
        return lambda: self.progress.advance(task)


def ideal_tokens(
    exchanges: Sequence[Exchange], tokenizer: ChatTokenizer, block_size: int
) -> tuple[int | None, tuple[str, ...]]:
    """Ideal hit tokens of the exchanges, in their order; None and a note if they are not known.

    They are not known when the tokenizer is not the server's, which shows in the prompt lengths.
    """
    requests = []
    for exchange in exchanges:
        reply = exchange.reply
        prompt = tokenizer.prompt_ids(exchange.messages)
        if len(prompt) != reply.prompt_tokens:
            note = (
                f"no ideal hit rate: the server counts {reply.prompt_tokens} prompt tokens where "
                f"the tokenizer gives {len(prompt)}; name the served model as --tokenizer"
            )
            return None, (note,)
        computed = prompt + tokenizer.text_ids(reply.text)
        requests.append((prompt, computed[: len(prompt) + reply.completion_tokens - 1]))
    return sum(ideal_hits(requests, block_size)), ()


def same_answers(run: Sequence[Exchange], control: Sequence[Exchange]) -> int:
    """How many requests got the same text in both runs."""
    texts = {(e.session, e.turn): e.reply.text for e in run}
    return sum(texts[e.session, e.turn] == e.reply.text for e in control)
