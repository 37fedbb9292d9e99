"""One rank above 0 of a tensor parallel engine: `python -m ragcache.worker FD`.

Rank 0 starts it, sends the settings and then every step; see `ragcache.engine.workers`.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from ragcache import logs
from ragcache.config import ServeSettings
from ragcache.engine.messages import Start, receive, send
from ragcache.engine.model import choose_device
from ragcache.engine.parallel import joined
from ragcache.errors import RagcacheError
from ragcache.loading import load_runner

log = logging.getLogger(__name__)


def main() -> None:
    """Run until rank 0 closes its end of the socket, or is no more."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is rank 0 that ends this process
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        _work(connection)
    except EOFError:
        return  # rank 0 is no more
    except RagcacheError as error:
        send(connection, f"failed: {error}")
        sys.exit(1)
    except Exception as error:
        log.exception("this rank has failed")
        send(connection, f"failed: {type(error).__name__}: {error}")
        sys.exit(1)


def _end_with(connection: Connection) -> None:
    """End this process with its connection, even from within a collective."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _work(connection: Connection) -> None:
    start: Start = receive(connection)
    settings = ServeSettings(**start.settings)
    logs.configure(start.log_level, settings.log_format, start.rank)
    disable_progress_bar()  # rank 0 shows one
    meet = partial(_meet, connection)
    meet()
    device = choose_device(settings.device)
    with joined(start.rank, settings.tensor_parallel_size, Path(start.store), device):
        runner = load_runner(settings, meet).runner
        while True:
            runner.run(receive(connection))


def _meet(connection: Connection) -> None:
    """See `Workers.meet`."""
    send(connection, None)
    receive(connection)


if __name__ == "__main__":
    main()
