"""Why a prompt was not found in the cache: it is compared with those that came before.

The index itself cannot tell, since what is gone leaves nothing behind. So fingerprints of the
recent prompts are kept beside it, without any text or token id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import NamedTuple

from ragcache.prefix.fingerprint import Fingerprint, wire_order
from ragcache.prefix.records import MOST_KEPT, Kept, Record, Records
from ragcache.types import Explanation, MissReason, Segment


class Match(NamedTuple):
    """The record that a prompt is compared with, and the tokens in which both begin alike."""

    record: Record
    tokens: int
    exact: bool


class History:
    """Remembers prompts and explains by them how far a new one was found in the cache.

    The life of a request: `fingerprint`, once it is admitted `compare` and `remember`, and
    `computed` when its KV is written. Thread-safe. At most `max_records` prompts are remembered,
    in about `max_bytes` bytes: one and an eighth a token (at 16 tokens a block), 16 a segment, 160
    for each span that a segment ends in, and two KiB. `Records` says which are given up first.
    """

    def __init__(
        self,
        block_size: int,
        max_bytes: int = 32 << 20,
        max_records: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self._records = Records(max_bytes, max_records)
        self._clock = clock
        self._lock = Lock()

    @property
    def generation(self) -> int:
        """For `fingerprint`: taken before the prompt is looked up in the cache, see `forget`."""
        return self._records.generation

    def fingerprint(
        self,
        namespace: bytes,
        tokens: Sequence[int],
        segments: Sequence[Segment],
        generation: int,
    ) -> Fingerprint:
        """Take a prompt's fingerprint, for `compare` and `remember`; most of what they cost."""
        return Fingerprint.of(namespace, tokens, segments, self.block_size, generation)

    def compare(
        self,
        prompt: Fingerprint,
        hit_tokens: int,
        previous: str | None = None,
        limit: int | None = None,
    ) -> Explanation:
        """Explain a hit of `hit_tokens`; changes nothing.

        The prompt is compared with that of the request `previous`, if it is known in its
        namespace, else with the one that it resembles most. `limit` is the most that could be hit,
        if it was limited. Of what is cached under another salt only the length is told.
        """
        most = len(prompt) - 1 if limit is None else min(limit, len(prompt) - 1)
        with self._lock:
            named = previous and self._records.get(previous, prompt.namespace)
            match = _match(prompt, named) if named else self._nearest(prompt, hit_tokens, most)
            if match is None:
                missed = hit_tokens < self._whole(most)
                reason = MissReason.COLD if missed else None
                return Explanation(len(prompt), hit_tokens, reason)
            return self._explain(prompt, hit_tokens, most, match, named=bool(named))

    def remember(self, request_id: str, prompt: Fingerprint, explanation: Explanation) -> None:
        """Keep a prompt, and how it was explained.

        What it hit of retained prefixes is retained anew, by the record that it was compared
        with; others with the same prefix do not learn of it, so EXPIRED is said too early where
        they were read by other prompts.
        """
        with self._lock:
            record = Record(request_id, prompt, explanation)
            now = self._clock()
            source = self._records.get(explanation.previous or "", prompt.namespace)
            for kept in source.kept if source else ():
                if kept.tokens <= explanation.hit_tokens and kept.until > now:
                    kept.until = now + kept.ttl
                    record.kept.append(kept)
            self._records.add(record)

    def computed(
        self,
        request_id: str,
        kept: Iterable[tuple[int, float]] = (),
        published: int | None = None,
    ) -> None:
        """Note that a prompt's KV is written: from now on it counts as having been cached.

        `kept` are its retentions as (tokens, ttl in seconds), `published` the tokens that later
        prompts could find, if not all. Does nothing for an id that is not remembered, or whose
        fingerprint is from before its namespace was forgotten.
        """
        with self._lock:
            record = self._records.computed(request_id)
            if record is not None:
                length = len(record.prompt)
                record.cached = length if published is None else min(published, length)
                now = self._clock()
                record.kept += [Kept(tokens, ttl, now + ttl) for tokens, ttl in kept]
                del record.kept[:-MOST_KEPT]

    def explanation(self, request_id: str, owner: bytes) -> Explanation | None:
        """Say how a request was explained; None where it is unknown or another owner's."""
        with self._lock:
            record = self._records.get(request_id, owner)
            return None if record is None else record.explanation

    def forget(self, owner: bytes) -> None:
        """Forget the prompts of an owner, or of one namespace: their blocks were dropped.

        Those whose fingerprints have been taken will not be found either: they publish no more.
        """
        with self._lock:
            self._records.forget(owner)

    def _whole(self, tokens: int) -> int:
        """The tokens in whole blocks."""
        return tokens // self.block_size * self.block_size

    def _nearest(self, prompt: Fingerprint, hit_tokens: int, most: int) -> Match | None:
        best = _best(prompt, self._records.candidates(prompt))
        if best is None or best.tokens < self.block_size:
            other = _best(prompt, self._records.elsewhere(prompt))
            if other is not None and self._findable(other, most) > hit_tokens:
                return other
        return best

    def _findable(self, match: Match, most: int) -> int:
        """The tokens that a hit would have had while the record was cached."""
        return self._whole(min(match.tokens, most, match.record.cached))

    def _explain(
        self, prompt: Fingerprint, hit_tokens: int, most: int, match: Match, named: bool
    ) -> Explanation:
        other = match.record.prompt
        shown = other.namespace == prompt.namespace
        differs = match.tokens < min(len(prompt), len(other))
        token, exact = (match.tokens, match.exact) if differs else (None, True)
        lost = self._findable(match, most) - hit_tokens
        reason: MissReason | None = None
        if hit_tokens >= self._whole(most):
            lost = 0
        elif lost > 0:
            reason, token, exact = self._gone(prompt, hit_tokens, match), hit_tokens, True
        elif differs and _changed(prompt, match, named):
            reason = MissReason.CHANGED
            lost = max(0, self._whole(min(len(other), most)) - hit_tokens)
        else:
            reason, lost = self._new(prompt, hit_tokens, match), 0
        if reason is MissReason.COLD and not (match.tokens or named):
            return Explanation(len(prompt), hit_tokens, reason)
        return Explanation(
            len(prompt),
            hit_tokens,
            reason,
            lost,
            token,
            exact,
            segment=None if token is None else _segment(prompt, other if shown else prompt, token),
            previous=match.record.id if shown else None,
        )

    def _gone(self, prompt: Fingerprint, hit_tokens: int, match: Match) -> MissReason:
        """Why blocks that the record had cached are not to be found."""
        if match.record.prompt.namespace != prompt.namespace:
            return MissReason.NAMESPACE
        ends = [kept.until for kept in match.record.kept if self._whole(kept.tokens) > hit_tokens]
        expired = ends and max(ends) <= self._clock()
        return MissReason.EXPIRED if expired else MissReason.EVICTED

    def _new(self, prompt: Fingerprint, hit_tokens: int, match: Match) -> MissReason | None:
        """What to call a rest that no record has: it may go on from one, or resemble none."""
        if match.tokens < self.block_size and not hit_tokens:
            return MissReason.BELOW_BLOCK if match.tokens else MissReason.COLD
        goes_on = match.tokens >= min(match.record.prompt.content_end, prompt.last_message)
        return None if goes_on else MissReason.COLD


def _match(prompt: Fingerprint, record: Record) -> Match:
    return Match(record, *prompt.common(record.prompt))


def _best(prompt: Fingerprint, records: Iterable[Record]) -> Match | None:
    """The first of those that have most in common with a prompt."""
    matches = (_match(prompt, record) for record in records)
    return max(matches, key=lambda match: match.tokens, default=None)


def _changed(prompt: Fingerprint, match: Match, named: bool) -> bool:
    """Whether the difference lies in what the client meant to be equal.

    The request that a client names is one that it goes on from. Any other prompt has to be equal
    again behind the difference.
    """
    other = match.record.prompt
    if named:
        return match.tokens < other.content_end
    return prompt.resumes(other, match.tokens)


def _segment(prompt: Fingerprint, other: Fingerprint, token: int) -> str | None:
    names = {prompt.segment(token), other.segment(token)} - {None}
    return min(filter(None, names), key=wire_order, default=None)
