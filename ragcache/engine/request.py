"""A request on its way through the engine: token ids in, token ids out."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from ragcache.prefix.rows import Plan
from ragcache.types import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """What the engine needs to know of one request; text ended at the border.

    `prompt` holds at least one token id; `sampling.max_tokens` is set. `namespace` says whose
    cached blocks may be used.
    """

    id: str
    prompt: list[int]
    sampling: SamplingParams
    namespace: bytes
    eos_token_ids: frozenset[int]
    admitted: bool = field(init=False, default=False)  # its hit has been announced
    branched: bool = field(init=False, default=False)  # its n choices have been created
    seed: int = field(init=False)
    sequences: list[Sequence] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        chosen = self.sampling.seed
        self.seed = secrets.randbits(64) if chosen is None else chosen & (2**64 - 1)

    @property
    def max_tokens(self) -> int:
        """Output tokens allowed for each choice."""
        if self.sampling.max_tokens is None:
            raise ValueError("the engine needs max_tokens to be resolved")
        return self.sampling.max_tokens

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Token ids that end a choice."""
        eos = frozenset() if self.sampling.ignore_eos else self.eos_token_ids
        return eos | self.sampling.stop_token_ids


class Sequence:
    """One choice of a request: `num_computed` tokens have KV, chasing `len(tokens)`.

    `tokens` is the prompt and what was sampled so far; it only ever grows, and the prefix cache
    reads it when blocks are published.
    """

    __slots__ = (
        "index",
        "num_computed",
        "plan",
        "prompt_len",
        "request",
        "row",
        "shared",
        "tokens",
    )

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.row = f"{request.id}/{index}"
        self.tokens = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.num_computed = 0
        self.plan: Plan | None = None  # of the last attempt to admit; valid for one generation
        self.shared: dict[str, int] = {}  # leading blocks in common with running rows
        request.sequences.append(self)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        """The sampled tokens."""
        return self.tokens[self.prompt_len :]
