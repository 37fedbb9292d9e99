"""A request on its way through the engine: token ids in, token ids out."""

from __future__ import annotations

import copy
import secrets
from dataclasses import dataclass, field

from ragcache.engine.constraint import Grammar
from ragcache.engine.lookup import PromptLookup
from ragcache.prefix.rows import Plan
from ragcache.types import SamplingParams, TokenLogprob


@dataclass(slots=True, eq=False)
class Request:
    """What the engine needs to know of one request; text ended at the border.

    `prompt` holds at least one token id; `sampling.max_tokens` is set. `namespace` says whose
    cached blocks may be used. Each of the `breakpoints` asks to keep the first so many tokens of
    the prompt for so many seconds. Only the first `cacheable` tokens are read from the cache or
    published to it, None for all.
    """

    id: str
    prompt: list[int]
    sampling: SamplingParams
    namespace: bytes
    eos_token_ids: frozenset[int]
    grammar: Grammar | None = None
    breakpoints: tuple[tuple[int, float], ...] = ()
    cacheable: int | None = None
    admitted: bool = field(init=False, default=False)  # its hit has been announced
    branched: bool = field(init=False, default=False)  # its n choices have been created
    seed: int = field(init=False)
    sequences: list[Sequence] = field(init=False, default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(init=False, default_factory=list)  # from token 1

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
        """Token ids that end a choice; a grammar ends with its end token in any case."""
        ignored = self.sampling.ignore_eos and self.grammar is None
        eos = frozenset() if ignored else self.eos_token_ids
        return eos | self.sampling.stop_token_ids

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are asked for and still to come."""
        wanted = self.sampling.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt) - 1


class Sequence:
    """One choice of a request: `num_computed` tokens have KV, chasing `len(tokens)`.

    `tokens` is the prompt and what came after it so far, sampled or forced by the grammar; it
    only ever grows, and the prefix cache reads it when blocks are published.
    """

    __slots__ = (
        "constraint",
        "index",
        "lookup",
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
        self.constraint = request.grammar.constraint() if request.grammar else None
        self.lookup = PromptLookup()
        request.sequences.append(self)

    @property
    def ended(self) -> bool:
        """Whether its last event is out: nothing more is sampled for it."""
        return self not in self.request.sequences

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def readable(self) -> int:
        """Leading tokens whose KV may come from the cache."""
        limits = [len(self.tokens) - 1, self.publishable]
        if self.request.lacks_prompt_logprobs:  # no logits come from the cache
            limits.append(len(self.request.prompt_logprobs))
        return min(limits)

    @property
    def publishable(self) -> int:
        """Leading tokens whose KV others may find in the cache."""
        cacheable = self.request.cacheable
        return len(self.tokens) if cacheable is None else min(cacheable, len(self.tokens))

    @property
    def num_output(self) -> int:
        """Tokens behind the prompt so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.tokens[self.prompt_len :]

    def behind(self, draft: list[int]) -> Sequence:
        """What this would be if it had gone on with `draft`; only to be sampled from."""
        supposed = copy.copy(self)
        supposed.tokens = self.tokens + draft
        return supposed


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of one sequence, from its token number `start`.

    The last of them may be a `draft`: tokens that the sequence does not have yet, whose KV counts
    once sampling has come to the same ones.
    """

    sequence: Sequence
    start: int
    count: int
    draft: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Those that are computed."""
        return self.sequence.tokens[self.start : self.start + self.count] + self.draft

    @property
    def settled(self) -> int:
        """How many of them the sequence has."""
        return self.count - len(self.draft)

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last token, so that a new one is sampled."""
        reaches = self.start + self.settled == len(self.sequence.tokens)
        return reaches and not self.sequence.ended

    @property
    def num_logits(self) -> int:
        """How many rows of logits are wanted, the chunk's last ones."""
        if self.sequence.request.lacks_prompt_logprobs:
            return self.count
        return len(self.draft) + int(self.samples)


def total(chunks: list[Chunk]) -> int:
    """How many tokens they compute."""
    return sum(chunk.count for chunk in chunks)
