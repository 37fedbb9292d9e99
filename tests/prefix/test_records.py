"""Records are bounded in number and in size, and leave nothing behind."""

from __future__ import annotations

import tracemalloc
from itertools import count

import pytest

from ragcache.prefix.explain import History
from ragcache.prefix.fingerprint import Fingerprint
from ragcache.prefix.names import namespace_name, owner_name
from ragcache.prefix.records import (
    BYTES_PER_RECORD,
    MOST_FORGOTTEN,
    MOST_KEPT,
    RECENT,
    Record,
    Records,
)
from ragcache.types import Explanation, Segment

OWNER, BUSY = owner_name("model", "tenant"), owner_name("model", "busy")


def add(
    records: Records,
    record_id: str,
    tokens: list[int],
    salt: str | None = None,
    owner: bytes = OWNER,
) -> int:
    """Add a computed record; returns the bytes that it counts for."""
    segments = [Segment("system", 0, 16), Segment("messages.0", 16, len(tokens))]
    prompt = Fingerprint.of(namespace_name(owner, salt), tokens, segments, block_size=4)
    records.add(Record(record_id, prompt, Explanation(len(tokens), 0)))
    assert (records.computed(record_id) is None) == (records.get(record_id, owner) is None)
    return prompt.size + BYTES_PER_RECORD


def known(records: Records, count: int, owner: bytes = OWNER) -> list[int]:
    return [i for i in range(count) if records.get(str(i), owner)]


@pytest.mark.parametrize(
    ("max_bytes", "max_records", "left"),
    [(99_999, 3, [3, 4, 5]), (100_000, 3, [3, 4, 5]), (5_000, 9, [4, 5]), (2_000, 9, [])],
)
def test_the_oldest_go_first(max_bytes, max_records, left):
    records = Records(max_bytes, max_records)
    for i in range(6):
        add(records, str(i), [i] * 20)
    assert known(records, 6) == left


def test_an_id_again_replaces_the_record():
    records = Records(9_000, 9)
    add(records, "0", [1] * 40)
    assert add(records, "0", [2] * 50) == records._size
    assert len(records._by_prefix) == 2


def test_an_id_again_can_be_another_owner_s():
    records = Records(9_000, 9)
    add(records, "0", [1] * 40)
    add(records, "0", [2] * 40, owner=BUSY)
    assert records.get("0", OWNER) is None
    assert records._shelves.keys() == {BUSY}


def test_nothing_is_left_of_what_is_gone():
    records = Records(10_000, 3)
    for i in range(50):
        add(records, str(i), [i] * 40, salt=str(i))
    assert (len(records._by_id), len(records._by_prefix), len(records._groups)) == (3, 6, 4)
    records.forget(OWNER)
    indexes = [records._by_id, records._by_prefix, records._groups, records._shelves]
    assert [*indexes, records._size] == [{}, {}, {}, {}, 0]


@pytest.mark.parametrize(("max_bytes", "max_records"), [(1_000_000, 6), (6 * 2_500, 99)])
def test_one_owner_does_not_push_out_the_others(max_bytes, max_records):
    records = Records(max_bytes, max_records)
    for i in range(4):
        add(records, str(i), [i] * 20)
    for i in range(4, 90):
        add(records, str(i), [i] * 20, owner=BUSY)
    assert known(records, 4) == [1, 2, 3]
    assert known(records, 90, BUSY) == [87, 88, 89]


def test_a_record_beyond_the_bound_pushes_out_its_owner_s_only():
    records = Records(9_000, 9)
    add(records, "0", [0] * 20)
    add(records, "1", [1] * 20, owner=BUSY)
    add(records, "2", [2] * 20_000, owner=BUSY)
    assert (known(records, 3), known(records, 3, BUSY)) == ([0], [])


@pytest.mark.parametrize(("length", "step"), [(60, 60), (2_000, 2_000), (2_000, 4), (2_000, 1)])
def test_records_take_no_more_memory_than_the_bound_says(length, step):
    """Whatever the shape of the prompts: for many short messages too."""
    bound = 1 << 20
    names = [f"messages.{i}" for i in range(length // step)]
    tracemalloc.start()
    history = History(16, max_bytes=bound, max_records=9_999)
    for i in count():
        if len(history._records._by_id) < i:  # the first was given up
            break
        tokens = [i, *range(length - 1)]
        bounds = range(0, length, step)
        segments = [Segment(n, start, start + step) for n, start in zip(names, bounds, strict=True)]
        prompt = history.fingerprint(namespace_name(OWNER), tokens, segments, history.generation)
        history.remember(f"request-{i}", prompt, history.compare(prompt, 0))
        history.computed(f"request-{i}", kept=[(40 + i, 300.0 + i)] * 4)
    del tokens, segments, prompt
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(history._records._by_id) > 10
    assert 0.5 * bound < used < 1.1 * bound


def test_retentions_of_a_record_are_bounded():
    history = History(4)
    for i in range(50):
        tokens = [1] * (20 + i)
        prompt = history.fingerprint(namespace_name(OWNER), tokens, [], history.generation)
        history.remember(str(i), prompt, history.compare(prompt, len(tokens) - 1))
        history.computed(str(i), kept=[(len(tokens), 300.0)])
    assert len(history._records.get("49", OWNER).kept) == MOST_KEPT


def test_the_latest_are_candidates_and_an_older_one_by_its_prefix():
    records = Records(1_000_000, 99)
    for i in range(RECENT + 9):
        add(records, str(i), [i] * 20)
    prompt = records.get("3", OWNER).prompt
    found = [record.id for record in records.candidates(prompt)]
    assert found == [*map(str, range(RECENT + 8, 8, -1)), "3"]


def test_elsewhere_are_the_owner_s_other_namespaces():
    records = Records(1_000_000, 99)
    for i, salt in enumerate((None, "a", None, "b")):
        add(records, str(i), [i] * 20, salt)
    prompt = records.get("0", OWNER).prompt
    assert [record.id for record in records.elsewhere(prompt)] == ["3", "1"]


def test_forgotten_owners_are_told_apart_up_to_a_number():
    records = Records(1_000_000, 99)
    prompt = Fingerprint.of(namespace_name(OWNER), [1] * 20, [], block_size=4)
    for i in range(MOST_FORGOTTEN):
        records.forget(owner_name("model", str(i)))
    records.add(Record("0", prompt, Explanation(20, 0)))
    assert records.computed("0") is not None
    records.forget(BUSY)
    assert len(records._forgotten) <= MOST_FORGOTTEN
    records.add(Record("0", prompt, Explanation(20, 0)))
    assert records.computed("0") is None
