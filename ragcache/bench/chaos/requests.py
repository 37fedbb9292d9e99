"""Random requests on both wires; request number n is the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Literal

from ragcache.bench.prose import prose

Wire = Literal["chat", "messages"]
Json = dict[str, Any]

PATHS: dict[Wire, str] = {"chat": "/chat/completions", "messages": "/messages"}
SYSTEMS, SYSTEM_WORDS = 5, (20, 120)
THREADS, TURNS, TURN_WORDS = 40, 4, (3, 40)
LONGEST_ANSWER = 16
MALFORMED, SCHEMAS, BRANCHES = 0.02, 0.05, 0.1  # shares of the requests
SCHEMA = {
    "type": "object",
    "properties": {"lit": {"type": "boolean"}, "height": {"enum": [12, 30, 45]}},
    "required": ["lit", "height"],
}


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """A body for one of the wires.

    `leaves_after` is when its client leaves, as a share of what requests usually take, or None.
    Without `is_valid` it must be refused. With `is_greedy` its answer is the same each time: what
    is drawn may turn on the last bit of a probability, and that on the batch.
    """

    number: int
    wire: Wire
    body: Json
    leaves_after: float | None
    is_valid: bool
    is_greedy: bool

    @property
    def is_comparable(self) -> bool:
        """Whether it gets an answer that a later one can be compared with."""
        return self.leaves_after is None and self.is_valid and self.is_greedy

    def alone(self) -> ChaosRequest:
        """The same, sharing the cache with no other, and in one piece."""
        body = self.body | {"cache_salt": f"alone {self.number}", "stream": False}
        body.pop("stream_options", None)
        return replace(self, body=body)


def make_request(seed: int, number: int, model: str, leaving: float) -> ChaosRequest:
    """A share `leaving` of the requests leave."""
    rng = random.Random(f"{seed} {number}")
    wire: Wire = rng.choice(("chat", "messages"))
    leaves_after = rng.random() if rng.random() < leaving else None
    longest = LONGEST_ANSWER if leaves_after is None else 4 * LONGEST_ANSWER
    body: Json = {"model": model, "max_tokens": rng.randint(1, longest)}
    body["stream"] = rng.random() < 0.5
    system, messages = _conversation(seed, rng)
    if wire == "chat":
        body["messages"] = [{"role": "system", "content": system}, *messages]
        _chat_options(body, rng)
    else:
        body |= {"system": _marked(system, rng), "messages": messages}
        _messages_options(body, rng)
    if rng.random() < 0.5:
        body["temperature"] = 0
    is_valid = rng.random() >= MALFORMED
    if not is_valid:
        body[rng.choice(("temperature", "max_tokens"))] = -1
    is_greedy = body.get("temperature") == 0
    return ChaosRequest(number, wire, body, leaves_after, is_valid, is_greedy)


def _conversation(seed: int, rng: random.Random) -> tuple[str, list[Json]]:
    """A system prompt, and the first turns of a thread: many requests begin alike."""
    system = random.Random(f"{seed} system {rng.randrange(SYSTEMS)}")
    thread = random.Random(f"{seed} thread {rng.randrange(THREADS)}")
    roles = ("user", "assistant") * TURNS
    messages = [
        {"role": role, "content": prose(thread, thread.randint(*TURN_WORDS))}
        for role in roles[: 2 * rng.randrange(TURNS) + 1]
    ]
    if rng.random() < 0.5:
        messages[-1] = {"role": "user", "content": prose(rng, rng.randint(*TURN_WORDS))}
    return prose(system, system.randint(*SYSTEM_WORDS)), messages


def _chat_options(body: Json, rng: random.Random) -> None:
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < BRANCHES:
        body["n"] = rng.randint(2, 3)
    if rng.random() < SCHEMAS:
        schema = {"name": "light", "schema": SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 2}
    if rng.random() < 0.2:
        body["stop"] = ["e ", "?"]
    if rng.random() < 0.3:
        body |= {"temperature": 0.8, "top_p": 0.9, "seed": rng.randrange(1000)}


def _messages_options(body: Json, rng: random.Random) -> None:
    if rng.random() < SCHEMAS:
        body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    if rng.random() < 0.2:
        body["stop_sequences"] = ["e "]
    if rng.random() < 0.3:
        body |= {"top_k": 40, "top_p": 0.95}


def _marked(system: str, rng: random.Random) -> list[Json]:
    block: Json = {"type": "text", "text": system}
    if rng.random() < 0.2:
        block["cache_control"] = {"type": "ephemeral", "ttl": rng.choice(("5m", "1h"))}
    return [block]
