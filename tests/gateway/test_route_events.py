"""What a router reads in answers."""

from __future__ import annotations

import json

import pytest

from ragcache.gateway.route.events import data, error_code, reported_hits


@pytest.mark.parametrize(
    ("body", "hits"),
    [
        ({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}, 4),
        ({"usage": {"input_tokens": 9, "cache_read_input_tokens": 5}}, 5),
        ({"type": "message_start", "message": {"usage": {"cache_read_input_tokens": 6}}}, 6),
        ({"usage": None}, None),
        ({"usage": {"prompt_tokens_details": None}}, None),
        ({"usage": {"cache_read_input_tokens": "6"}}, None),
        ({"text": '"usage": {"cache_read_input_tokens": 6}'}, None),
        ({"content": [{"input": {"cached_tokens": 0, "usage": {"cached_tokens": 0}}}]}, None),
    ],
)
def test_cached_tokens_are_read_where_the_usage_is(body, hits):
    assert reported_hits(json.dumps(body).encode()) == hits


@pytest.mark.parametrize("body", [b"", b'"usage"', b'{"usage":', b'["usage"]', b'{"usage":9e9}'])
def test_anything_else_tells_nothing(body):
    assert reported_hits(body) is None
    assert error_code(body.replace(b"usage", b"error")) is None


def test_a_number_without_end_is_no_trouble():
    number = b"9" * 5000
    reported_hits(b'{"usage":{"cache_read_input_tokens":' + number + b"}}")


def test_errors_have_their_code_in_both_shapes():
    events = b': hi\n\nevent: error\ndata: {"type":"error","error":{"code":"full"}}\n\ndata: 1\n\n'
    assert [error_code(each) for each in data(events)] == ["full", None]
