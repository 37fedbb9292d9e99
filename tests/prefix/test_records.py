"""Records are bounded in number and in size, and leave nothing behind."""

from __future__ import annotations

import pytest

from ragcache.prefix.fingerprint import Fingerprint
from ragcache.prefix.names import namespace_name, owner_name
from ragcache.prefix.records import RECENT, Record, Records
from ragcache.types import Explanation, Segment

OWNER = owner_name("model", "tenant")


def add(records: Records, record_id: str, tokens: list[int], salt: str | None = None) -> None:
    segments = [Segment("system", 0, 16), Segment("messages.0", 16, len(tokens))]
    prompt = Fingerprint.of(namespace_name(OWNER, salt), tokens, segments, block_size=4)
    records.add(Record(record_id, prompt, Explanation(len(tokens), 0)))
    assert (records.computed(record_id) is None) == (records.get(record_id, OWNER) is None)


def known(records: Records, count: int) -> list[int]:
    return [i for i in range(count) if records.get(str(i), OWNER)]


@pytest.mark.parametrize(
    ("max_tokens", "max_records", "left"), [(99, 3, [3, 4, 5]), (50, 9, [4, 5]), (19, 9, [])]
)
def test_the_oldest_go_first(max_tokens, max_records, left):
    records = Records(max_tokens, max_records)
    for i in range(6):
        add(records, str(i), [i] * 20)
    assert known(records, 6) == left


def test_an_id_again_replaces_the_record():
    records = Records(99, 9)
    add(records, "0", [1] * 40)
    add(records, "0", [2] * 50)
    assert records._tokens == 50
    assert len(records._by_prefix) == 2


def test_nothing_is_left_of_what_is_gone():
    records = Records(10_000, 3)
    for i in range(50):
        add(records, str(i), [i] * 40, salt=str(i))
    assert (len(records._by_id), len(records._by_prefix), len(records._groups)) == (3, 6, 4)
    records.forget(OWNER)
    assert [records._by_id, records._by_prefix, records._groups, records._tokens] == [{}, {}, {}, 0]


def test_the_latest_are_candidates_and_an_older_one_by_its_prefix():
    records = Records(10_000, 99)
    for i in range(RECENT + 9):
        add(records, str(i), [i] * 20)
    prompt = records.get("3", OWNER).prompt
    found = [record.id for record in records.candidates(prompt)]
    assert found == [*map(str, range(RECENT + 8, 8, -1)), "3"]


def test_elsewhere_are_the_owner_s_other_namespaces():
    records = Records(10_000, 99)
    for i, salt in enumerate((None, "a", None, "b")):
        add(records, str(i), [i] * 20, salt)
    prompt = records.get("0", OWNER).prompt
    assert [record.id for record in records.elsewhere(prompt)] == ["3", "1"]
