"""`ragcache bench langchain`: what `ChatRagcache` adds to a call of the bare engine.

The same conversation, each time with another question, goes through `ChatRagcache` in this process
or over a real socket, and in turn with that to the bare engine (the control), so that what else the
machine does hits both alike. The engine takes token ids, so the control begins with rendering and
encoding the conversation. The model is a stand-in; its time is subtracted, and with it what others
do meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from statistics import median
from typing import Any, NamedTuple
from uuid import uuid4

from rich.progress import track
from rich.table import Table

from ragcache.bench.figures import percentile
from ragcache.bench.options import LangchainBench
from ragcache.bench.prose import prose
from ragcache.bench.standin import MODEL, StandIn, served_stand_in
from ragcache.bench.tokens import ChatTokenizer
from ragcache.embedded import EmbeddedGateway
from ragcache.engine.request import Request
from ragcache.errors import ConfigError
from ragcache.types import SamplingParams, Token

try:
    from langchain_core.messages import convert_to_messages
    from langchain_ragcache import ChatRagcache, shutdown
except ImportError as error:
    raise ConfigError(
        "bench langchain measures the chat model, which is a package of its own: "
        "pip install langchain-ragcache"
    ) from error

WARM_UP = 5  # rounds that are not counted

Messages = list[tuple[str, str]]


class Call(NamedTuple):
    """A call that has been made; `seconds` are without those of the stand-in."""

    seconds: float
    prompt_tokens: int
    output_tokens: int


Subject = Callable[[Messages], Awaitable[Call]]


def run(options: LangchainBench) -> dict[str, Any]:
    """Measure; times are in seconds."""
    return asyncio.run(_run(options))


def render(results: dict[str, Any]) -> Table:
    """Lay the results of `run` out as a table."""
    table = Table(title="calls, in milliseconds, and what is added to the engine's own")
    for name in ("call", "through"):
        table.add_column(name, no_wrap=True)
    for name in ("in", "out", "engine", "p50", "p95", "added", "per token"):
        table.add_column(name, justify="right")
    for row in results["rows"]:
        tokens = (str(row[name]) for name in ("prompt_tokens", "output_tokens"))
        times = [row[name] for name in ("engine", "p50", "p95", "added")]
        times.append(row["added"] / row["output_tokens"])
        table.add_row(row["call"], row["through"], *tokens, *(f"{t * 1e3:.2f}" for t in times))
    return table


async def _run(options: LangchainBench) -> dict[str, Any]:
    async with served_stand_in() as (stand_in, url):
        try:
            return await _measure(options, stand_in, url)
        finally:
            await asyncio.to_thread(shutdown)


async def _measure(options: LangchainBench, stand_in: StandIn, url: str) -> dict[str, Any]:
    system = prose(random.Random(0), options.words)
    rows: list[dict[str, Any]] = []
    for name, ask, tokens in (("invoke", _invoke, 1), ("astream", _astream, options.tokens)):
        limits: dict[str, Any] = {"temperature": 0, "max_tokens": tokens}
        embedded = ChatRagcache(engine=EmbeddedGateway(stand_in.serving), base_url=None, **limits)
        remote = ChatRagcache(model=MODEL, base_url=url, **limits)
        control = partial(_control, stand_in, ChatTokenizer(stand_in.tokenizer), tokens)
        for through, model in {"in process": embedded, "HTTP": remote}.items():
            subjects = (control, partial(ask, stand_in, model))
            engine, calls = await _take_turns(subjects, system, options.calls)
            rows.append({"call": name, "through": through, **_row(engine, calls)})
    return {"rows": rows}


async def _take_turns(subjects: Sequence[Subject], system: str, rounds: int) -> list[list[Call]]:
    calls: list[list[Call]] = [[] for _ in subjects]
    numbers = count(100_000)  # all of the same length
    for _ in track(range(rounds + WARM_UP), description="calls"):
        for made, call in zip(calls, subjects, strict=True):
            question = f"Question {next(numbers)}: what do the passages say?"
            made.append(await call([("system", system), ("user", question)]))
    return [made[WARM_UP:] for made in calls]


def _row(engine: list[Call], calls: list[Call]) -> dict[str, Any]:
    control = median(call.seconds for call in engine)
    seconds = [call.seconds for call in calls]
    return {
        "prompt_tokens": calls[-1].prompt_tokens,
        "output_tokens": calls[-1].output_tokens,
        "engine": control,
        "p50": median(seconds),
        "p95": percentile(seconds, 95),
        "added": median(seconds) - control,
    }


async def _control(
    stand_in: StandIn, tokenizer: ChatTokenizer, tokens: int, messages: Messages
) -> Call:
    started = stand_in.clock()
    prompt = tokenizer.prompt_ids([{"role": role, "content": text} for role, text in messages])
    sampling = SamplingParams(tokens, temperature=0)
    request = Request(uuid4().hex, prompt, sampling, b"control", frozenset())
    produced = 0
    async for events in stand_in.client.submit(request):
        produced += sum(isinstance(event, Token) for event in events)
    return Call(stand_in.clock() - started, len(prompt), produced)


async def _invoke(stand_in: StandIn, model: ChatRagcache, messages: Messages) -> Call:
    """On a thread: the gateway answers on this one's event loop."""

    def call() -> Call:
        prompt = convert_to_messages(messages)
        started = stand_in.clock()
        usage = model.invoke(prompt).usage_metadata
        return _call(stand_in.clock() - started, usage)

    return await asyncio.to_thread(call)


async def _astream(stand_in: StandIn, model: ChatRagcache, messages: Messages) -> Call:
    usage = None
    prompt = convert_to_messages(messages)
    started = stand_in.clock()
    async for chunk in model.astream(prompt):
        usage = chunk.usage_metadata or usage
    return _call(stand_in.clock() - started, usage)


def _call(seconds: float, usage: Mapping[str, Any] | None) -> Call:
    assert usage is not None  # every answer has it
    return Call(seconds, usage["input_tokens"], usage["output_tokens"])
