"""Rank 0's side of tensor parallelism: the other ranks' processes, and the runner over them."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from ragcache_kernels.interface import StepLayout
from torch import Tensor

from ragcache.config import ServeSettings
from ragcache.engine.batch import StepBatch
from ragcache.engine.messages import Start, pack, receive, send
from ragcache.engine.parallel import abort, joined
from ragcache.engine.runner import Runner, nothing
from ragcache.errors import ConfigError

log = logging.getLogger(__name__)

REAP = 10.0  # seconds in which the kernel has ended a process whose socket is closed
SEEN = 2.0  # seconds in which a lost worker is known: its collectives and its socket end together


class Worker:
    """One rank above 0: a process of its own, which lives no longer than this end of its socket.

    It is a command rather than a fork or a spawn of multiprocessing: those would copy the threads'
    locks of this process, or run the user's main module again.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ragcache.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is the user's
                env=self._environment(),
                pass_fds=[theirs.fileno()],
                process_group=0,  # out of reach of ctrl-C: running requests may finish
            )
        self.connection = Connection(ours.detach())

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(map(os.path.abspath, sys.path))  # scripts and notebooks change it
        # transformers takes the rank's GPU from LOCAL_RANK.
        return {**os.environ, "PYTHONPATH": path, "LOCAL_RANK": str(self.rank)}

    def failure(self) -> str | None:
        """What the worker has to say, after it has sent something or its socket was closed.

        None when all is well.
        """
        try:
            reason = receive(self.connection)
        except (EOFError, OSError):
            reason = self._ending()
        return None if reason is None else f"rank {self.rank} {reason}"

    def _ending(self) -> str:
        try:
            return f"ended with status {self._process.wait(REAP)}"
        except subprocess.TimeoutExpired:
            return "has closed its socket"

    def kill(self) -> None:
        """End the process; it holds nothing that outlives it."""
        self._process.kill()
        self._process.wait()


class Workers:
    """Ranks 1 … N−1 of this process, which is rank 0.

    Raises ConfigError when one of them cannot start.
    """

    def __init__(self, settings: ServeSettings, device: torch.device) -> None:
        self._lost = Future[str]()  # what has ended the first worker that did
        self._watcher: threading.Thread | None = None
        self._closing = False
        ranks = settings.tensor_parallel_size
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcache-")))
            self._workers = [Worker(rank) for rank in range(1, ranks)]
            stack.callback(self._end)
            store = folder / "store"
            level, options = log.getEffectiveLevel(), settings.model_dump()
            for worker in self._workers:
                send(worker.connection, Start(worker.rank, str(store), level, options))
            self._meet()
            os.environ["LOCAL_RANK"] = "0"  # whatever started this process may have set another
            stack.enter_context(joined(0, ranks, store, device))
            self._stack = stack.pop_all()

    @property
    def failed(self) -> str | None:
        """What has ended a worker, if one has ended since `meet`."""
        return self._lost.result() if self._lost.done() else None

    def meet(self) -> None:
        """Wait until every worker has loaded its part; from now on they are watched.

        Raises:
            ConfigError: when one of them fails instead.
        """
        self._meet()
        self._watcher = threading.Thread(target=self._watch, name="ragcache-workers", daemon=True)
        self._watcher.start()

    def _meet(self) -> None:
        awaited = list(self._workers)
        while awaited:
            worker = _next(awaited)
            awaited.remove(worker)
            reason = worker.failure()
            if reason is not None:
                raise _naming(reason)
        self.send(None)

    @contextmanager
    def needed(self) -> Iterator[None]:
        """What this rank does within takes all workers.

        Raises:
            ConfigError: naming a worker that was lost, instead of the collective that failed.
        """
        try:
            yield
            reason = self.failed
        except (RuntimeError, OSError):
            with suppress(TimeoutError):
                raise _naming(self._lost.result(SEEN)) from None
            raise
        if reason is not None:
            raise _naming(reason)

    def send(self, message: object) -> None:
        """Send a message to every worker."""
        frame = pack(message)
        for worker in self._workers:
            worker.connection.send_bytes(frame)

    def watch(self, fail: Callable[[str], None]) -> None:
        """Call `fail` as soon as a worker has ended, at once if one has; on any thread."""
        self._lost.add_done_callback(lambda lost: fail(lost.result()))

    def _watch(self) -> None:
        ended = _next(self._workers)
        if self._closing:
            return
        reason = f"{ended.failure()}"
        log.error("%s", reason)
        self._lost.set_result(reason)
        abort()  # this rank may be waiting for the one that is lost

    def close(self) -> None:
        """End all workers and leave their group; closing again does nothing."""
        self._closing = True
        self._stack.close()

    def _end(self) -> None:
        for worker in self._workers:
            worker.kill()
        if self._watcher is not None:
            self._watcher.join()
        for worker in self._workers:
            worker.connection.close()


def _next(workers: list[Worker]) -> Worker:
    """Wait for a worker that has sent something, or has ended."""
    ready = wait([worker.connection for worker in workers])
    return next(worker for worker in workers if worker.connection in ready)


def _naming(reason: str) -> ConfigError:
    return ConfigError(f"tensor_parallel_size: {reason}")


class ParallelRunner:
    """Runs every step on all ranks; the logits are those of rank 0."""

    def __init__(self, runner: Runner, workers: Workers) -> None:
        self._runner = runner
        self._workers = workers

    @property
    def exact(self) -> bool:
        """See `Runner`; sums over ranks have not been looked at."""
        return False

    def run(self, batch: StepBatch, meanwhile: Callable[[], None] = nothing) -> Tensor:
        """See `Runner`."""
        self._workers.send(batch)
        logits = self._runner.run(batch, meanwhile)
        if logits.is_cuda:  # not yet computed, and never, if the collectives have been aborted
            torch.cuda.current_stream(logits.device).synchronize()
        if self._workers.failed is not None:
            raise RuntimeError(self._workers.failed)
        return logits

    def prepare(self, layout: StepLayout) -> None:
        """See `Runner`; the other ranks plan when their step comes."""
        self._runner.prepare(layout)

    def close(self) -> None:
        """End the other ranks."""
        self._runner.close()
        self._workers.close()
