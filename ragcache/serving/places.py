"""How many answers may be under way at once: in all, and of each tenant."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ragcache.errors import InvalidRequest, Overloaded, TenantOverloaded

LONGEST = 60  # seconds; clients that are told more retry when they please
WEIGHT = 0.1  # of the latest request in the mean


@dataclass(slots=True)
class Places:
    """A number of places, and when those who found none should come again.

    The k-th who was turned away is to come when k places should have been left, as though it had
    queued outside: all told the same, they would come together and be turned away once more.
    """

    limit: int
    taken: int = 0
    turned_away: int = 0  # and not made up for by a place that was left since
    seconds: float = 1.0  # for which a place is taken, on average

    def has(self, count: int) -> bool:
        """Whether so many are free."""
        return self.taken + count <= self.limit

    def turn_away(self) -> int:
        """Count someone who found no place; returns the seconds until there should be one."""
        self.turned_away = min(self.turned_away + 1, self.limit)
        seconds = math.ceil(self.turned_away * self.seconds / self.limit)
        return min(max(seconds, 1), LONGEST)

    def leave(self, count: int, seconds: float) -> None:
        """Give back so many that were taken for so long."""
        self.taken -= count
        self.turned_away = max(self.turned_away - count, 0)
        self.seconds += WEIGHT * (seconds - self.seconds)


class Place:
    """What a prompt has taken for its answers; leaving it again does nothing."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: Callable[[], None] | None = leave

    def leave(self) -> None:
        """Give it to the next one."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


@dataclass(slots=True)
class Capacity:
    """All places and, with `per_tenant`, the share of each tenant; used from any event loop."""

    limit: int
    per_tenant: int | None = None
    clock: Callable[[], float] = time.monotonic
    _all: Places = field(init=False)
    _tenants: dict[str, Places] = field(init=False, default_factory=dict)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._all = Places(self.limit)

    def take(self, tenant: str, prompts: int = 1, n: int = 1) -> list[Place]:
        """Take room for `n` answers to each prompt at once, or none.

        Raises:
            Overloaded: when there are not so many now, with the seconds to wait.
            InvalidRequest: when there never will be.
        """
        count = prompts * n
        with self._lock:
            groups = self._groups(tenant)
            for places, what in groups:
                if count > places.limit:
                    raise InvalidRequest(
                        f"{count} answers in one request, but {what} at most {places.limit}",
                        param="prompt" if prompts > 1 else "n",
                    )
            for places, what in groups:
                if not places.has(count):
                    raise (Overloaded if places is self._all else TenantOverloaded)(
                        f"{places.taken} answers are running or queued, and {what} at most "
                        f"{places.limit}",
                        retry_after=places.turn_away(),
                    )
            for places, _ in groups:
                places.taken += count
        return [self._place([places for places, _ in groups], n) for _ in range(prompts)]

    def _groups(self, tenant: str) -> list[tuple[Places, str]]:
        groups = [(self._all, "the server takes")]
        if self.per_tenant is not None:
            own = self._tenants.setdefault(tenant, Places(self.per_tenant))
            groups.insert(0, (own, "each tenant may have"))
        return groups

    def _place(self, taken: list[Places], n: int) -> Place:
        since = self.clock()

        def leave() -> None:
            with self._lock:
                for places in taken:
                    places.leave(n, self.clock() - since)

        return Place(leave)
