"""Long work on text leaves the cores to the engine."""

import os
import sys
from threading import get_native_id

import pytest

from ragcache.prompt import threads
from ragcache.prompt.threads import NICENESS, background_threads
from ragcache.prompt.tokenize import TokenizerPool

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness here")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, get_native_id())


@linux
def test_only_these_threads_step_back():
    before = niceness()
    with background_threads(2, "text") as pool:
        assert pool.submit(niceness).result() == min(before + NICENESS, 19)
    assert niceness() == before


@linux
async def test_prompts_are_tokenized_on_such_threads(smollm2):
    pool = TokenizerPool(smollm2)
    for is_large in (False, True):
        assert await pool._run(is_large, niceness) > niceness()
    pool.close()


@linux
def test_where_it_is_forbidden_the_work_is_done_all_the_same(monkeypatch):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(threads.os, "setpriority", forbidden)
    with background_threads(1, "text") as pool:
        assert pool.submit(niceness).result() == niceness()
