"""The best pace of the engine, over stretches whose end the host has seen."""

from ragcache.engine.pace import Pace


def test_the_best_pace_is_that_of_the_longest_chunks():
    now = 0.0
    pace = Pace(lambda: now)
    assert pace.best == 0
    for tokens, seconds in ((8, 1.0), (512, 2.0), (32, 1.0)):
        pace.begin()
        now += seconds
        pace.end(tokens, awaited=True)
        now += 100  # nothing to do
    assert pace.best == 256


def test_a_step_that_nobody_waited_for_ends_with_the_next():
    now = 0.0
    pace = Pace(lambda: now)
    pace.begin()
    now += 0.001  # launched, and not computed
    pace.end(512, awaited=False)
    assert pace.best == 0
    pace.begin()
    now += 3.999
    pace.end(88, awaited=True)
    assert pace.best == 150
