"""Places for requests: how many, whose, and when to come again."""

import threading

import pytest

from ragcache.errors import InvalidRequest, Overloaded, TenantOverloaded
from ragcache.serving.places import LONGEST, Capacity


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(capacity, tenant="", count=1) -> int:
    with pytest.raises(Overloaded) as caught:
        capacity.take(tenant, count)
    return caught.value.retry_after


def test_places_are_taken_all_at_once_or_not_at_all():
    capacity = Capacity(4)
    first = capacity.take("", 3)
    refused(capacity, count=2)
    (last,) = capacity.take("")
    refused(capacity)
    last.leave()
    last.leave()  # which gives back nothing more
    capacity.take("")
    refused(capacity)
    for place in first:
        place.leave()
    assert len(capacity.take("", 3)) == 3


def test_a_tenant_has_a_share_and_leaves_the_rest_to_others():
    capacity = Capacity(5, per_tenant=2)
    capacity.take("a", 2)
    with pytest.raises(TenantOverloaded, match="each tenant may have at most 2"):
        capacity.take("a")
    capacity.take("b", 2)
    capacity.take("c")
    with pytest.raises(Overloaded, match=r"5 answers are running or queued, .* at most 5"):
        capacity.take("d")


def test_each_answer_to_a_prompt_counts():
    capacity = Capacity(8, per_tenant=6)
    several, *_ = capacity.take("a", 2, n=2)
    with pytest.raises(Overloaded, match="4 answers are running or queued"):
        capacity.take("a", n=3)
    several.leave()
    several.leave()
    (last,) = capacity.take("a", n=4)
    with pytest.raises(Overloaded):
        capacity.take("a")
    last.leave()
    capacity.take("a", n=4)
    with pytest.raises(InvalidRequest, match="7 answers in one request") as never:
        capacity.take("a", n=7)
    assert never.value.param == "n"


@pytest.mark.parametrize(
    ("count", "limit"), [(9, "the server takes at most 8"), (4, "each tenant may have at most 3")]
)
def test_what_never_fits_is_not_told_to_come_again(count, limit):
    capacity = Capacity(8, per_tenant=None if count > 8 else 3)
    capacity.take("")
    with pytest.raises(InvalidRequest, match=f"{count} answers in one request, but {limit}") as no:
        capacity.take("", count)
    assert no.value.retry_after is None
    assert no.value.param == "prompt"


def test_those_turned_away_come_again_one_after_the_other():
    clock = Clock()
    capacity = Capacity(4, clock=clock)
    for _ in range(200):  # until the mean of 20 seconds is known
        (place,) = capacity.take("")
        clock.now += 20
        place.leave()
    places = capacity.take("", 4)
    assert [refused(capacity) for _ in range(6)] == [5, 10, 15, 20, 20, 20]
    clock.now += 20
    for place in places:
        place.leave()
    capacity.take("", 4)
    assert refused(capacity) == 5  # all of them may have come meanwhile


def test_the_time_to_wait_is_whole_seconds_within_bounds():
    clock = Clock()
    capacity = Capacity(1, clock=clock)
    assert capacity.take("")
    assert refused(capacity) == 1
    slow = Capacity(1, clock=clock)
    for _ in range(50):
        (place,) = slow.take("")
        clock.now += 10_000
        place.leave()
    slow.take("")
    assert refused(slow) == LONGEST


def test_threads_share_the_places():
    capacity = Capacity(3)
    most, now, lock = [0], [0], threading.Lock()

    def work():
        for _ in range(300):
            try:
                (place,) = capacity.take("")
            except Overloaded:
                continue
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            with lock:
                now[0] -= 1
            place.leave()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] <= 3
    assert len(capacity.take("", 3)) == 3
