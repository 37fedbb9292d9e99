"""Drafts that are looked up in what a sequence has read and said."""

import random

import pytest

from ragcache.engine.lookup import FIRST, LEAST, LONGEST, SHORTEST, PromptLookup


def drafts(tokens, limit=8, right=()):
    """A lookup's draft once drafts of some lengths have turned out to be right."""
    lookup = PromptLookup()
    for length in right:
        lookup.judge(length, length)
    return lookup.draft(tokens, limit)


def behind_match(tokens):
    """The place behind the last of the longest matches, looked for one by one."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return end
    return None


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3], [1, 2, 3, 4, 2], [5, 2, 6, 7, 2]])
def test_there_is_no_draft_where_the_last_two_tokens_are_new(tokens):
    assert drafts(tokens) == []


def test_a_draft_is_what_came_behind_the_same_tokens():
    assert drafts([1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5]


def test_the_longest_match_wins_and_of_these_the_last():
    assert drafts([9, 8, 1, 2, 5, 5, 5, 7, 1, 2, 6, 6, 6, 9, 8, 1, 2]) == [5, 5, 5]
    assert drafts([1, 2, 5, 5, 5, 1, 2, 6, 6, 6, 3, 1, 2]) == [6, 6, 6]


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([3, 3, 3], [3, 3, 3]),
        ([4, 1, 2, 1, 2], [1, 2, 1]),
        ([1, 2, 7, 1, 2], [7, 1, 2]),
    ],
)
def test_a_loop_goes_on(tokens, draft):
    assert drafts(tokens) == draft


def test_a_draft_is_no_longer_than_asked_for():
    tokens = list(range(20)) * 2
    assert [len(drafts(tokens, limit, right=[8])) for limit in (-1, 0, 1, 5, 16, 99)] == [
        *(0, 0, 1, 5, 16, 16)
    ]


def test_drafts_grow_while_they_are_right_and_shrink_to_what_was():
    tokens = list(range(50)) * 2
    lookup, lengths = PromptLookup(), []
    for right in (FIRST, 2 * FIRST, 4, 0, LEAST, 2):
        lengths.append(len(lookup.draft(tokens, 40)))
        lookup.judge(lengths[-1], right)
    assert lengths == [FIRST, 2 * FIRST, 4 * FIRST, 5, LEAST, 2 * LEAST]


def test_what_a_limit_cut_short_does_not_shrink_the_next():
    tokens = list(range(50)) * 2
    lookup = PromptLookup()
    lookup.judge(8, 8)
    lookup.judge(2, 2)
    assert len(lookup.draft(tokens, 40)) == 16
    for _ in range(99):
        lookup.judge(8, 8)
    assert len(lookup.draft(tokens, 40)) == 16  # twice as many as have been right


def test_drafts_of_growing_text_are_those_of_the_whole():
    rng = random.Random(1)
    tokens, lookup = [], PromptLookup()
    for _ in range(400):
        tokens += rng.choices(range(4), k=rng.choice([1, 1, 2, 90]))
        place = behind_match(tokens)
        expected = [] if place is None else (tokens[place:] * FIRST)[:FIRST]
        assert lookup.draft(tokens, 8) == expected


def test_drafts_that_are_all_wrong_become_seldom():
    lookup, tokens, drafted = PromptLookup(), [1, 2, 3, 1, 2], []
    for step in range(300):
        draft = lookup.draft(tokens, 8, 0.3)
        if draft:
            lookup.judge(len(draft), 0)
            drafted.append(step)
    assert drafted[:4] == [0, 1, 9, 17]
    assert lookup.draft(tokens, 8)  # where they need not be right so often
    lookup.judge(2, 2)
    lookup.judge(2, 2)
    assert lookup.draft(tokens, 8, 0.3)
