"""Every reason for a miss, each beside a control that has another one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest

from ragcache.prefix.explain import History
from ragcache.prefix.fingerprint import Fingerprint
from ragcache.prefix.names import namespace_name, owner_name
from ragcache.types import Explanation, MissReason, Segment

OWNER = owner_name("model", "tenant")
SPACE = namespace_name(OWNER)
SALTED = namespace_name(OWNER, "salt")
FOREIGN = namespace_name(owner_name("model", "other"))
BLOCK = 4

_rng = random.Random(0)


def text(length: int) -> list[int]:
    """Tokens like no others."""
    return [_rng.randrange(50_000) for _ in range(length)]


Parts = dict[str, list[int]]  # a prompt by segment
GENERATION = {"generation_prompt": text(3)}


def chat(*messages: list[int], system: list[int], tools: list[int] | None = None) -> Parts:
    head = {"tools": tools} if tools else {}
    numbered = {f"messages.{i}": tokens for i, tokens in enumerate(messages)}
    return {**head, "system": system, **numbered, **GENERATION}


def flat(parts: Parts) -> list[int]:
    return [token for tokens in parts.values() for token in tokens]


class SmallHistory(History):
    def take(self, parts: Parts, namespace: bytes = SPACE) -> Fingerprint:
        ends = [0]
        for tokens in parts.values():
            ends.append(ends[-1] + len(tokens))
        named = zip(parts, pairwise(ends), strict=True)
        segments = [Segment(name, start, end) for name, (start, end) in named]
        return self.fingerprint(namespace, flat(parts), segments, self.generation)

    def ask(
        self,
        parts: Parts,
        hit_tokens: int = 0,
        previous: str | None = None,
        namespace: bytes = SPACE,
        limit: int | None = None,
    ) -> Explanation:
        return self.compare(self.take(parts, namespace), hit_tokens, previous, limit)

    def serve(
        self,
        request_id: str,
        parts: Parts,
        hit_tokens: int = 0,
        namespace: bytes = SPACE,
        kept: Iterable[tuple[int, float]] = (),
        published: int | None = None,
    ) -> Explanation:
        """Let a request be computed; returns how it is explained."""
        prompt = self.take(parts, namespace)
        explanation = self.compare(prompt, hit_tokens)
        self.remember(request_id, prompt, explanation)
        self.computed(request_id, kept, published)
        return explanation


@pytest.fixture
def history(clock) -> SmallHistory:
    return SmallHistory(BLOCK, clock=clock)


SYSTEM, QUESTION, ANSWER, LATER = text(40), text(30), text(30), text(30)
TURN = chat(QUESTION, system=SYSTEM)
NEXT = chat(QUESTION, ANSWER, LATER, system=SYSTEM)


def edited(tokens: Sequence[int], place: int, length: int = 1) -> list[int]:
    """Replace `length` tokens by one that differs from the first, in its low byte too."""
    return [*tokens[:place], tokens[place] ^ 1, *tokens[place + length :]]


def test_the_first_prompt_is_cold(history):
    assert history.serve("a", TURN) == Explanation(73, 0, MissReason.COLD)


def test_a_prompt_like_no_other_is_cold(history):
    history.serve("a", TURN)
    assert history.ask(chat(text(30), system=text(40))) == Explanation(73, 0, MissReason.COLD)


def test_a_prompt_below_a_block_misses_nothing(history):
    assert history.ask({"prompt": text(4)}) == Explanation(4, 0)
    assert history.ask({"prompt": text(5)}).reason is MissReason.COLD


def test_what_is_hit_as_far_as_can_be_misses_nothing(history):
    history.serve("a", TURN)
    assert history.ask(TURN, 72) == Explanation(73, 72, previous="a")
    assert history.ask(TURN, 68).reason is MissReason.EVICTED


def test_less_than_a_block_in_common(history):
    history.serve("a", {"prompt": [1, 2, 3, *text(30)]})
    shared = history.ask({"prompt": [1, 2, 3, *text(30)]})
    assert (shared.reason, shared.lost_tokens, shared.token) == (MissReason.BELOW_BLOCK, 0, 3)
    assert history.ask({"prompt": text(33)}).reason is MissReason.COLD


def test_a_further_turn_misses_nothing(history):
    history.serve("a", TURN)
    explanation = history.ask(NEXT, 68)
    assert (explanation.reason, explanation.lost_tokens) == (None, 0)
    assert explanation.previous == "a"


def test_a_question_of_its_own_behind_the_same_system_prompt_misses_nothing(history):
    history.serve("a", TURN)
    explanation = history.ask(chat(text(20), system=SYSTEM), 40)
    assert explanation == Explanation(63, 40, None, 0, 40, True, "messages.0", None, "a")


def test_a_conversation_of_its_own_is_cold_behind_the_same_system_prompt(history):
    history.serve("a", NEXT)
    other = chat(text(30), text(30), text(30), system=SYSTEM)
    assert history.ask(other, 40).reason is MissReason.COLD


@pytest.mark.parametrize(
    ("changed", "token", "segment"),
    [
        (chat(QUESTION, system=SYSTEM, tools=edited(ANSWER, 7)), 7, "tools"),
        (chat(QUESTION, system=edited(SYSTEM, 9), tools=ANSWER), 39, "system"),
        (chat(edited(QUESTION, 2), LATER, LATER, system=SYSTEM, tools=ANSWER), 72, "messages.0"),
        (chat(QUESTION, system=SYSTEM[1:], tools=ANSWER), 30, "system"),
        (chat(QUESTION, system=SYSTEM), 0, "tools"),  # without the tools
    ],
)
@pytest.mark.parametrize("previous", ["a", None])
def test_text_that_comes_again_behind_a_difference_has_changed(
    history, changed, token, segment, previous
):
    before = chat(QUESTION, LATER, text(30), system=SYSTEM, tools=ANSWER)
    history.serve("a", before)
    hit_tokens = token // BLOCK * BLOCK
    explanation = history.ask(changed, hit_tokens, previous)
    lost = min(len(flat(before)), len(flat(changed)) - 1) // BLOCK * BLOCK - hit_tokens
    assert explanation.reason is MissReason.CHANGED
    assert (explanation.token, explanation.segment) == (token, segment)
    assert explanation.lost_tokens == lost > 0
    assert explanation.previous == "a"


def test_a_named_request_is_what_the_client_goes_on_from(history):
    history.serve("a", TURN)
    other = chat(text(30), system=SYSTEM)
    assert history.ask(other, 40).reason is None
    named = history.ask(other, 40, previous="a")
    assert (named.reason, named.token, named.segment) == (MissReason.CHANGED, 40, "messages.0")
    assert named.lost_tokens == 32
    assert history.ask(NEXT, 68, previous="a").reason is None


def test_a_generation_prompt_need_not_be_repeated(history):
    history.serve("a", TURN)
    thinking = chat([9, *ANSWER], LATER, system=SYSTEM + QUESTION)
    assert history.ask(thinking, 68, previous="a").reason is None
    assert history.ask(thinking, 68).reason is None


def test_a_named_request_is_compared_with_before_it_is_computed(history):
    history.remember("a", history.take(TURN), history.ask(TURN))
    other = chat(text(30), system=SYSTEM)
    assert history.ask(other, previous="a").reason is MissReason.CHANGED
    assert history.ask(other) == Explanation(73, 0, MissReason.COLD)


def test_an_unknown_name_is_as_none(history):
    history.serve("a", TURN)
    assert history.ask(NEXT, 68, previous="b") == history.ask(NEXT, 68)


def test_blocks_that_were_cached_and_are_gone_were_evicted(history):
    history.serve("a", TURN)
    explanation = history.ask(NEXT, 20)
    assert explanation == Explanation(
        133, 20, MissReason.EVICTED, 48, 20, True, "system", None, "a"
    )


def test_a_prompt_that_was_never_computed_cannot_have_been_evicted(history):
    history.remember("a", history.take(TURN), history.ask(TURN))
    assert history.ask(NEXT).reason is MissReason.COLD
    history.computed("a")
    assert history.ask(NEXT).reason is MissReason.EVICTED


def test_only_what_was_published_can_have_been_evicted(history):
    history.serve("a", TURN, published=20)
    assert history.ask(NEXT, 20).reason is None
    assert history.ask(NEXT, 16).lost_tokens == 4


def test_what_may_not_be_hit_is_not_missed(history):
    history.serve("a", TURN)
    assert history.ask(TURN, 0, limit=0).reason is None
    assert history.ask(TURN, 0, limit=22).lost_tokens == 20


def test_after_its_ttl_a_retained_prefix_has_expired(history, clock):
    history.serve("a", TURN, kept=[(40, 300)])
    clock.now += 299
    assert history.ask(NEXT, 20).reason is MissReason.EVICTED
    clock.now += 1
    expired = history.ask(NEXT, 20)
    assert (expired.reason, expired.lost_tokens) == (MissReason.EXPIRED, 48)
    assert history.ask(NEXT, 40).reason is MissReason.EVICTED  # behind what was retained


def test_the_longest_ttl_counts(history, clock):
    history.serve("a", TURN, kept=[(72, 300), (40, 3600)])
    clock.now += 300
    assert history.ask(NEXT, 20).reason is MissReason.EVICTED
    assert history.ask(NEXT, 40).reason is MissReason.EXPIRED
    clock.now += 3300
    assert history.ask(NEXT, 20).reason is MissReason.EXPIRED


def test_a_hit_lets_the_ttl_start_anew_for_all_that_share_it(history, clock):
    history.serve("a", TURN, kept=[(40, 300)])
    clock.now += 200
    history.serve("b", NEXT, hit_tokens=68)
    clock.now += 200
    assert history.ask(TURN, 20, previous="a").reason is MissReason.EVICTED
    clock.now += 100
    assert history.ask(TURN, 20, previous="a").reason is MissReason.EXPIRED
    assert history.ask(NEXT, 20, previous="b").reason is MissReason.EXPIRED


def test_a_hit_before_its_end_does_not(history, clock):
    history.serve("a", TURN, kept=[(40, 300)])
    clock.now += 200
    history.serve("b", NEXT, hit_tokens=36)
    clock.now += 100
    assert history.ask(TURN, 20, previous="a").reason is MissReason.EXPIRED


@pytest.mark.parametrize("previous", [None, "a"])
def test_another_salt_of_the_owner_has_it_but_is_not_shown(history, previous):
    history.serve("a", TURN, namespace=SALTED)
    explanation = history.ask(NEXT, previous=previous)
    assert explanation == Explanation(133, 0, MissReason.NAMESPACE, 68, 0, True, "system")
    assert history.ask(chat(text(30), system=text(40))).reason is MissReason.COLD


def test_where_a_prompt_differs_from_one_under_another_salt_is_not_told(history):
    history.serve("a", TURN, namespace=SALTED, published=0)
    changed = chat(edited(QUESTION, 9), system=SYSTEM)
    assert history.ask(changed, previous="a") == Explanation(73, 0, MissReason.COLD)


@pytest.mark.parametrize("previous", [None, "a"])
def test_other_owners_are_never_looked_at(history, previous):
    history.serve("a", TURN, namespace=FOREIGN)
    assert history.ask(TURN, previous=previous) == Explanation(73, 0, MissReason.COLD)


def test_the_own_namespace_comes_first(history):
    history.serve("a", TURN, namespace=SALTED)
    history.serve("b", chat(text(30), system=SYSTEM))
    assert history.ask(TURN, 40).previous == "b"


def test_an_old_record_is_found_by_its_segments(history):
    history.serve("old", NEXT)
    for i in range(40):
        history.serve(str(i), chat(text(8), system=text(8)))
    assert history.ask(NEXT).previous == "old"
    assert history.ask(chat(QUESTION, text(9), system=SYSTEM), 20).previous == "old"


def test_the_record_with_most_in_common_is_taken(history):
    history.serve("a", NEXT)
    history.serve("b", chat(QUESTION, text(30), system=SYSTEM))
    assert history.ask(NEXT, 100).previous == "a"
    assert history.ask(TURN, 72).previous == "b"  # the later one of two


@pytest.mark.parametrize("token", [0, 1, 15, 16, 17, 500, 998, 999])
def test_the_first_differing_token_is_found(history, token):
    before = text(1_000)
    history.serve("a", {"prompt": before})
    explanation = history.ask({"prompt": edited(before, token)}, token // BLOCK * BLOCK, "a")
    assert (explanation.token, explanation.exact) == (token, True)


def test_a_difference_that_the_low_bytes_hide_is_placed_where_it_can_begin(history):
    before = text(40)
    hidden = before.copy()
    hidden[21] += 256
    history.serve("a", {"prompt": before})
    explanation = history.ask({"prompt": hidden}, 20, previous="a")
    assert (explanation.reason, explanation.token) == (MissReason.CHANGED, 16)
    assert not explanation.exact


def test_explanations_are_told_to_their_owner_only(history):
    explanation = history.serve("a", TURN)
    assert history.explanation("a", OWNER) == explanation
    assert history.explanation("a", owner_name("model", "other")) is None
    assert history.explanation("b", OWNER) is None


@pytest.mark.parametrize(("dropped", "left"), [(OWNER, "c"), (SPACE, "bc"), (b"", "")])
def test_what_was_dropped_is_forgotten(history, dropped, left):
    spaces = {"a": SPACE, "b": SALTED, "c": FOREIGN}
    for request_id, namespace in spaces.items():
        history.serve(request_id, TURN, namespace=namespace)
    history.forget(dropped)
    known = [i for i, space in spaces.items() if history.explanation(i, space)]
    assert "".join(known) == left
    reasons = [history.ask(TURN, namespace=space).reason for space in spaces.values()]
    assert (MissReason.EVICTED in reasons) == bool(left)


@pytest.mark.parametrize(("dropped", "reason"), [(OWNER, "cold"), (SPACE, "cold"), (FOREIGN, None)])
@pytest.mark.parametrize("remembered", [True, False])
def test_what_was_under_way_at_a_drop_does_not_count_as_cached(
    history, dropped, reason, remembered
):
    prompt = history.take(TURN)
    if remembered:
        history.remember("a", prompt, history.compare(prompt, 0))
    history.forget(dropped)
    if not remembered:
        history.remember("a", prompt, history.compare(prompt, 0))
    history.computed("a", kept=[(40, 300)])
    assert history.ask(TURN).reason == (reason or MissReason.EVICTED)
    history.serve("b", TURN)  # the control: what began after it counts
    assert history.ask(TURN).reason is MissReason.EVICTED


@pytest.mark.parametrize(("num_blocks", "evicts"), [(2_000, False), (30, True)])
def test_only_a_cache_that_evicts_is_said_to_have_evicted(history, make_cache, num_blocks, evicts):
    cache = make_cache(num_blocks)
    rng = random.Random(1)
    reasons = set()
    for i in range(200):
        parts = chat(*([rng.randrange(3)] * rng.randrange(12) for _ in range(3)), system=SYSTEM)
        hit_tokens = cache.serve(flat(parts), SPACE)
        reasons.add(history.serve(str(i), parts, hit_tokens).reason)
    assert (MissReason.EVICTED in reasons) == evicts == (cache.evictions > 0)
    assert MissReason.NAMESPACE not in reasons
