from hypothesis import given
from hypothesis import strategies as st

from ragcache.bench.ideal import IdealCache, ideal_hits


def test_hits_are_whole_blocks_of_a_known_prefix():
    cache = IdealCache(4)
    cache.add(range(10))
    assert cache.hit_tokens([*range(10), 99]) == 8
    assert cache.hit_tokens([0, 1, 2, 3, 4, 5, 6, 99]) == 4
    assert cache.hit_tokens([0, 1, 2, 99, 4, 5, 6, 7]) == 0


def test_the_last_prompt_token_is_always_computed():
    cache = IdealCache(4)
    cache.add(range(8))
    assert cache.hit_tokens(range(8)) == 4
    assert cache.hit_tokens(range(9)) == 8


def test_equal_blocks_after_different_prefixes_are_different():
    cache = IdealCache(2)
    cache.add([1, 2, 5, 6])
    assert cache.hit_tokens([3, 4, 5, 6, 0]) == 0


def test_answers_count_for_later_requests():
    first = ([1, 2, 3], [1, 2, 3, 4])
    second = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    assert ideal_hits([first, second], block_size=2) == [0, 4]
    assert ideal_hits([second, first], block_size=2) == [0, 2]


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=8)


@given(prompts, st.integers(1, 4))
def test_the_ideal_is_the_longest_common_prefix_with_any_earlier_request(prompts, block_size):
    def naive(i):
        limit = len(prompts[i]) - 1
        return max(
            (
                n
                for n in range(0, limit + 1, block_size)
                for earlier in prompts[:i]
                if n <= len(earlier) and earlier[:n] == prompts[i][:n]
            ),
            default=0,
        )

    hits = ideal_hits([(prompt, prompt) for prompt in prompts], block_size)
    assert hits == [naive(i) for i in range(len(prompts))]
