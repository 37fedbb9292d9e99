"""What rank 0 and its workers tell each other, as bytes over a pair of sockets."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker.

    `store` is the file in which the ranks meet; `log_level` as in `logging`.
    """

    rank: int
    store: str
    log_level: int
    settings: dict[str, Any]


def send(connection: Connection, message: object) -> None:
    """Send anything that pickles; tensors must be on the host."""
    connection.send_bytes(pack(message))


def receive(connection: Connection) -> Any:
    """The next message; raises EOFError when the other end is gone."""
    return pickle.loads(connection.recv_bytes())


def pack(message: object) -> bytes:
    """The bytes of a message, for several receivers."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Tensors travel as arrays: torch would write a small archive for each."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented
