"""Agents that share one prompt: run `make demo`, or `python examples/demo.py`.

A researcher, a fact-checker and a writer work on questions about lighthouses, tides and bridges.
They share one system prompt with tool descriptions, and for each question one transcript that
holds the retrieved passages. The table shows how much of every prompt the gateway reused.

Without --url, the demo starts a gateway with the embedded model and ends it afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from library import Library
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ragcache.bench.client import ChatClient, Reply, RequestFailed, first_model

SYSTEM = """\
You are one of three agents who answer questions about lighthouses, tides and bridges for a
museum: a researcher, a fact-checker and a writer. Work from the passages in the conversation
only. Name the passage behind each claim, and say so when the passages do not hold the answer.

Tools:
- search(query, limit): returns the passages that share the most words with the query.
- fetch(title): returns the whole passage of that title.
- convert(value, from_unit, to_unit): converts lengths, weights and speeds.
- timeline(titles): lists the years that the passages mention, in order, each with its event.
- compare(first, second, aspect): sets two structures side by side in one aspect.
- cite(title): returns the passage's title in the form that the museum prints.
- translate(text, language): translates a text that is ready for print.
- publish(text): sends a text that the fact-checker has passed to the museum's labels."""

AGENTS = {
    "researcher": "As the researcher, list the facts that answer the question.",
    "fact-checker": "As the fact-checker, compare the answer above with the passages.",
    "writer": "As the writer, turn the checked facts into one sentence for a label.",
}
QUESTIONS = (
    "Which towers stood on the Eddystone rocks, and what ended each of them?",
    "Why did the bridges over the Tay and at Tacoma fall, and what did the wind do?",
    "Why are the tides of the Bay of Fundy so large?",
)
READY_TIMEOUT = 300.0  # seconds; a first start may have to read the weights from a slow disk


async def converse(client: ChatClient, library: Library) -> AsyncIterator[tuple[str, int, Reply]]:
    """Each agent's turn on each question: (agent, number of the question, reply)."""
    for number, question in enumerate(QUESTIONS, start=1):
        messages = [{"role": "system", "content": SYSTEM}]
        passages = [passage.text for passage in library.search(question, limit=3)]
        context = "Passages:\n\n" + "\n\n".join(passages)
        task = f"{context}\n\nQuestion: {question}\n\n"
        for agent, instruction in AGENTS.items():
            messages.append({"role": "user", "content": task + instruction})
            reply = await client.ask(messages, max_tokens=48)
            yield agent, number, reply
            messages.append({"role": "assistant", "content": reply.text})
            task = ""  # the passages are in the transcript now


async def show(url: str, console: Console) -> None:
    """Run the conversation against `url` and print its table."""
    table = Table(title="What the agents' prompts cost")
    for column in ("agent", "question", "prompt tokens", "reused", "computed", "first token"):
        table.add_column(column, justify="left" if column == "agent" else "right")
    library = Library()
    replies = []
    async with aiohttp.ClientSession() as http:
        client = ChatClient(http, url, await first_model(http, url))
        with Live(table, console=console):
            async for agent, number, reply in converse(client, library):
                replies.append(reply)
                table.add_row(agent, str(number), *_costs(reply))
    prompt = sum(reply.prompt_tokens for reply in replies)
    cached = sum(reply.cached_tokens for reply in replies)
    share = f"{cached / prompt:.1%}"
    console.print(f"\nHit rate {share}: {cached:,} of {prompt:,} prompt tokens were reused.")
    console.print(f"The last label: {replies[-1].text.strip()}", style="italic")


def _costs(reply: Reply) -> tuple[str, ...]:
    counts = (
        reply.prompt_tokens,
        reply.cached_tokens,
        reply.prompt_tokens - reply.cached_tokens,
    )
    return (*(f"{count:,}" for count in counts), f"{reply.ttft * 1e3:,.0f} ms")


@asynccontextmanager
async def running_gateway(console: Console) -> AsyncIterator[str]:
    """A gateway of our own on a free port, ended cleanly afterwards; yields its API's URL."""
    port = str(_free_port())
    command = Path(sys.executable).with_name("ragcache")
    process = await asyncio.create_subprocess_exec(
        command, "serve", "--port", port, "--log-level", "warning"
    )
    try:
        with console.status("Starting a gateway with the embedded model ..."):
            await wait_until_ready(f"http://127.0.0.1:{port}/ready", process)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def wait_until_ready(url: str, process: asyncio.subprocess.Process) -> None:
    """Poll /ready; raises RequestFailed if the gateway ends, or TimeoutError."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(READY_TIMEOUT):
        while not await _is_ready(http, url):
            if process.returncode is not None:
                raise RequestFailed(f"the gateway ended with exit code {process.returncode}")
            await asyncio.sleep(0.2)


async def _is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:  # not listening yet
        return False


async def run(url: str | None) -> int:
    console = Console()
    try:
        if url:
            await show(url, console)
        else:
            async with running_gateway(console) as own_url:
                await show(own_url, console)
    except (RequestFailed, TimeoutError) as error:
        console.print(f"The demo failed: {error or type(error).__name__}", style="red")
        return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Agents that share one prompt.")
    parser.add_argument("--url", help="API of a running gateway, such as http://127.0.0.1:8000/v1")
    try:
        sys.exit(asyncio.run(run(parser.parse_args().url)))
    except KeyboardInterrupt:  # the gateway has been ended on the way out
        sys.exit(130)
