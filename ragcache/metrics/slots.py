"""The recent past, in equal slots of time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Clock = Callable[[], float]
Item = TypeVar("Item")


class Slots(Generic[Item]):
    """The last `number` slots of `seconds` each, every one with an item made when first needed."""

    def __init__(
        self, seconds: int, number: int, make: Callable[[], Item], clock: Clock = time.monotonic
    ) -> None:
        self.seconds = seconds
        self.number = number
        self._make = make
        self._clock = clock
        self._items: deque[tuple[int, Item]] = deque()  # with the number of their slots

    def now(self) -> Item:
        """The item of the slot that is now."""
        slot = self._slot()
        if not self._items or self._items[-1][0] != slot:
            self._items.append((slot, self._make()))
        while self._items[0][0] <= slot - self.number:
            self._items.popleft()
        return self._items[-1][1]

    def last(self, slots: int) -> Iterator[Item]:
        """The items of the last so many slots, oldest first."""
        oldest = self._slot() - slots
        return (item for slot, item in self._items if slot > oldest)

    def line(self) -> list[Item | None]:
        """All slots, oldest first, that of now last; None where no item was needed."""
        items, end = dict(self._items), self._slot() + 1
        return [items.get(slot) for slot in range(end - self.number, end)]

    def _slot(self) -> int:
        return int(self._clock()) // self.seconds
