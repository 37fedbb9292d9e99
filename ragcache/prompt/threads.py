"""Threads for long work on text, which is never as urgent as the step that streams wait for."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import get_native_id

NICENESS = 10  # beside an engine that takes all cores: about a tenth of one


def background_threads(workers: int, name: str) -> ThreadPoolExecutor:
    """Threads that leave the cores to whoever else has work, where threads have priorities."""
    return ThreadPoolExecutor(workers, thread_name_prefix=name, initializer=_step_back)


def _step_back() -> None:
    if sys.platform != "linux":  # elsewhere, niceness is that of the process
        return
    thread = get_native_id()
    with suppress(PermissionError):  # a sandbox may forbid it; all works without
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
