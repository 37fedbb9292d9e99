from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from array import array
from itertools import combinations

import pytest

from ragcache.prefix.names import (
    block_keys,
    block_name,
    namespace_name,
    owner_name,
    pack,
    shared_blocks,
)

PRINT_NAMES = """
from ragcache.prefix.names import block_names, namespace_name, owner_name
names = block_names(namespace_name(owner_name("model", "tenant"), "salt"), range(14), 4)
print(*(name.hex() for name in names))
"""


def test_a_name_chains_the_parent_and_little_endian_tokens():
    parent = namespace_name(owner_name("model"))
    (key,) = block_keys([1, 258], 0, 1, 2)
    assert key == b"\x01\0\0\0\x02\x01\0\0"
    assert block_name(parent, key) == hashlib.sha256(parent + key).digest()


def test_names_are_the_same_in_every_process():
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PRINT_NAMES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(set(outputs.pop().split())) == 3


def test_fields_of_an_owner_never_run_together():
    fields = [
        ("m", "a", "bc"),
        ("m", "ab", "c"),
        ("m", "a", ""),
        ("m", "a", None),
        ("m", None, "a"),
        ("m", "", "a"),
        ("m", "a"),
        ("m\0", "a"),
        ("m", "\0a"),
        (),
        ("",),
        (None,),
    ]
    for one, other in combinations(fields, 2):
        assert owner_name(*one) != owner_name(*other), (one, other)
    assert owner_name(*fields[0]) == owner_name(*fields[0])


def test_the_namespaces_of_an_owner_begin_with_its_name_and_differ():
    owner = owner_name("model", "tenant")
    names = [namespace_name(owner, salt) for salt in (None, "", "a", "b")]
    assert all(name.startswith(owner) and len(name) == 64 for name in names)
    assert len(set(names)) == 4
    assert namespace_name(owner, "a") == names[2]
    assert not names[0].startswith(owner_name("model", "other"))


def test_keys_are_those_of_the_blocks_asked_for():
    tokens = list(range(10))
    keys = list(block_keys(tokens, 0, 3, 3))
    assert len(set(keys)) == 3
    assert list(block_keys(tokens, 1, 3, 3)) == keys[1:]
    assert list(block_keys(tuple(tokens), 2, 3, 3)) == keys[2:]
    assert list(block_keys(tokens, 2, 2, 3)) == []


@pytest.mark.parametrize(
    ("a", "b", "blocks"),
    [
        ([], [], 0),
        ([1, 2, 3], [1, 2, 3], 0),
        ([1, 2, 3, 4], [1, 2, 3, 4], 1),
        ([1, 2, 3, 4], [1, 2, 3, 5], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7], 1),
        ([1, 2, 3, 4, 5], [9, 2, 3, 4, 5], 0),
    ],
)
def test_only_whole_equal_blocks_are_shared(a: list[int], b: list[int], blocks: int):
    assert shared_blocks(a, b, 4) == shared_blocks(b, a, 4) == blocks


@pytest.mark.parametrize("first_difference", [0, 1, 4 * 64 - 1, 4 * 64, 4 * 200 + 3, 3_999])
def test_a_difference_ends_the_shared_blocks_wherever_it_is(first_difference: int):
    tokens = list(range(4_000))
    other = tokens.copy()
    other[first_difference] = -1
    assert shared_blocks(tokens, other, 4) == first_difference // 4
    assert shared_blocks(tokens, tokens.copy(), 4) == 1_000


def test_an_array_of_tokens_is_packed_like_a_list():
    tokens = [0, 1, 255, 256, 49_151, 2**31 - 1]
    assert pack(array("I", tokens)) == pack(tokens) == pack(array("i", tokens))
    assert pack(array("q", tokens)) == pack(tokens)
