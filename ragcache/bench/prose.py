"""Seeded prose: readable English of any length, so that token counts are those of real text."""

from __future__ import annotations

import random

_SUBJECTS = (
    "The harbour board",
    "A survey of the canal",
    "The museum's archive",
    "An engineer at the quarry",
    "The river authority",
    "A report on the viaduct",
    "The station master",
    "The council's treasurer",
    "A keeper of the lighthouse",
    "The observatory",
)
_VERBS = (
    "recorded",
    "described",
    "replaced",
    "measured",
    "questioned",
    "repaired",
    "compared",
    "approved",
    "catalogued",
    "postponed",
)
_OBJECTS = (
    "the granite piers",
    "the tide tables",
    "the copper wiring",
    "the signal lamps",
    "the northern embankment",
    "the freight timetable",
    "the pumping engines",
    "the orchard road",
    "the iron swing bridge",
    "the winter accounts",
)
_ENDINGS = (
    "after the spring floods",
    "before the new tariff came into force",
    "with help from the university",
    "although the budget had been cut",
    "in a letter to the ministry",
    "during a long strike",
    "at a cost of {n} pounds",
    "for the {n}th time",
    "in the year {year}",
    "within {n} days",
)

TOPICS = tuple(noun.removeprefix("the ") for noun in _OBJECTS)


def sentence(rng: random.Random) -> str:
    """One sentence of about ten words."""
    ending = rng.choice(_ENDINGS).format(n=rng.randint(4, 900), year=rng.randint(1780, 1990))
    return f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)} {ending}."


def prose(rng: random.Random, words: int) -> str:
    """Whole sentences, cut to exactly `words` words."""
    found: list[str] = []
    while len(found) < words:
        found += sentence(rng).split()
    return " ".join(found[:words])
