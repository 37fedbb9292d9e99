"""The order in which replicas are asked, where it is known what they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass

from ragcache.cluster.replica import Replica

STICKY = 2.0  # times the lowest cost that a conversation's replica may cost
BUSY, SLACK = 1.5, 4
SESSIONS = 100_000  # remembered; some 20 MB


@dataclass(frozen=True, slots=True)
class Option:
    """A replica that may answer a request.

    `hit_tokens` is what it is expected to find of the prompt in its cache, `credit` what that
    saves, in tokens of prefill.
    """

    replica: Replica
    prompt_tokens: int
    hit_tokens: int
    credit: float
    in_flight: float

    @property
    def cost(self) -> float:
        """New tokens, at least one, × batch size: LMetric (arXiv 2603.15202)."""
        return max(self.prompt_tokens - self.credit, 1.0) * (self.in_flight + 1)


class Choice:
    """Ranks options by cost.

    A conversation stays where it was, while that costs at most `STICKY` times as much. Among
    equals, the one comes first that was longest not given a prompt which was new to it. A prefix
    that everybody wants is cheap where it is cached, however many are there already: replicas with
    more than `BUSY` times the mean in flight, and `SLACK`, come last, and others learn it.
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()  # session → replica id
        self._last_miss: dict[str, int] = {}  # replica id → when, in misses
        self._misses = 0

    def rank(self, options: Sequence[Option], session: str | None) -> list[Option]:
        """Sort options, the best first."""
        home = self._homes.get(session) if session else None
        dear = STICKY * min((option.cost for option in options), default=0.0)
        busy = BUSY * sum(option.in_flight for option in options) / max(len(options), 1) + SLACK

        def key(option: Option) -> tuple[bool, bool, float, int]:
            replica = option.replica
            stays = replica.id == home and option.cost <= dear
            last_miss = self._last_miss.get(replica.id, 0)
            return option.in_flight > busy, not stays, option.cost, last_miss

        return sorted(options, key=key)

    def chosen(self, option: Option, session: str | None) -> None:
        """Remember where a conversation went."""
        if session:
            self._homes[session] = option.replica.id
            self._homes.move_to_end(session)
        if len(self._homes) > SESSIONS:
            self._homes.popitem(last=False)
        if not option.hit_tokens:
            self._misses += 1
            self._last_miss[option.replica.id] = self._misses

    def keep(self, replica_ids: Container[str]) -> None:
        """Forget all other replicas; their conversations are at home nowhere until they go on."""
        known = self._last_miss.items()
        self._last_miss = {each: miss for each, miss in known if each in replica_ids}
