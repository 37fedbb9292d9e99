"""Which replica is to answer a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ragcache.cluster.choice import Choice, Option
from ragcache.cluster.directory import Directory
from ragcache.cluster.expected import Expected
from ragcache.cluster.load import Load
from ragcache.cluster.replica import Replica
from ragcache.cluster.request import RouteRequest
from ragcache.cluster.ring import Ring
from ragcache.cluster.trust import Surprises, Trust

HOST_CREDIT = 0.75  # of a token of prefill is saved by one that is swapped in from host memory
OUTDATED = 60.0  # seconds without news, after which the directory is not asked any more


class Router:
    """Ranks replicas by what they hold and by their load, or by a hash where nothing is known.

    Nothing here ever waits.
    """

    def __init__(
        self, directory: Directory | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.load = Load(clock)
        self._directory = directory
        self._clock = clock
        self._news = clock()  # when the directory was last being fed
        self._choice = Choice()
        self._expected = Expected(clock)
        self._trust = Trust(clock)
        self._surprises = Surprises()
        self._ring = Ring(())

    def rank(self, request: RouteRequest, replicas: Sequence[Replica]) -> list[Option]:
        """Put replicas in the order in which they should be asked.

        Those that do not serve the model are left out, unless all do not: then any of them can
        say so.
        """
        fit = [each for each in replicas if request.fits(each)]
        options = [self._option(request, each) for each in fit or replicas]
        if self.is_blind():
            ranked = self._by_hash(options, request.session)
        else:
            ranked = self._choice.rank(options, request.session)
        return sorted(ranked, key=lambda option: self.load.is_full(option.replica.id))

    def is_blind(self) -> bool:
        """Whether nothing is known of what replicas hold."""
        if self._directory is None:
            return True
        now = self._clock()
        if self._directory.connected:
            self._news = now
        return now - self._news > OUTDATED

    def observe(self, replicas: Sequence[Replica]) -> None:
        """Take the reports of all replicas into account, about once a second; forget all others."""
        self.load.observe(replicas)
        ids = {replica.id for replica in replicas}
        for memory in (self._expected, self._trust, self._surprises, self._choice):
            memory.keep(ids)

    def sent(self, request: RouteRequest, option: Option) -> None:
        """Note that a replica is asked; `ended` must follow."""
        self.load.sent(option.replica.id)
        self._choice.chosen(option, request.session)
        if not self.is_blind():
            self._expected.add(option.replica, request.chains(option.replica))

    def ended(self, option: Option) -> None:
        """Note that it works on the request no more."""
        self.load.ended(option.replica.id)

    def expect_nothing(self) -> None:
        """Forget what was to be stored: caches were reset."""
        self._expected.keep(())

    def unanswered(self, request: RouteRequest, option: Option) -> None:
        """Note that a replica gave no answer, and so may have computed nothing."""
        self._expected.remove(option.replica, request.chains(option.replica))

    def learn(self, option: Option, reported: int) -> None:
        """Compare the expected hit tokens with those that an answer reports."""
        if option.prompt_tokens and not self.is_blind():
            self._surprises.learn(option.replica, option.hit_tokens, reported)
        if option.hit_tokens:
            self._trust.learn(option.replica, option.hit_tokens, reported)

    def _option(self, request: RouteRequest, replica: Replica) -> Option:
        hits, credit = (0, 0.0) if self.is_blind() else self._hits(request, replica)
        trusted = credit * self._trust.of(replica)
        return Option(replica, request.tokens, hits, trusted, self.load.in_flight(replica.id))

    def _hits(self, request: RouteRequest, replica: Replica) -> tuple[int, float]:
        """Hit tokens, and what they save in tokens of prefill."""
        assert self._directory is not None
        blocks = hosted = 0
        for names in request.chains(replica):
            found = self._directory.match(replica.id, names)
            hosted += self._directory.hosted(replica.id, names[:found])
            blocks += found + self._expected.match(replica, names[found:])
        size = replica.block_size
        return blocks * size, (blocks - hosted * (1 - HOST_CREDIT)) * size

    def _by_hash(self, options: Sequence[Option], session: str | None) -> list[Option]:
        if session is None:
            return sorted(options, key=lambda option: option.in_flight)
        known = {option.replica.id: option for option in options}
        if known.keys() != self._ring.ids:
            self._ring = Ring(known)
        loads = {each: option.in_flight for each, option in known.items()}
        return [known[each] for each in self._ring.bounded(session, loads)]
