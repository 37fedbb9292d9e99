"""What somebody knows of a prefix cache who is told of every change."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Mirror:
    """A sink; remembers all that it was told, and what can be found by that."""

    told: list[tuple[bytes, bool | None]] = field(default_factory=list)
    on_host: dict[bytes, bool] = field(default_factory=dict)  # by name

    def stored(self, name: bytes, on_host: bool) -> None:
        self.told.append((name, on_host))
        self.on_host[name] = on_host

    def removed(self, name: bytes) -> None:
        self.told.append((name, None))
        del self.on_host[name]  # else it was told twice, or of nothing
