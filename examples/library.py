"""The passages of the examples: short texts about lighthouses, tides and bridges."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "passages"


class Passage(NamedTuple):
    """A passage; its text begins with its title."""

    title: str
    text: str


class Library:
    """Passages, found by the rare words that they share with a question."""

    def __init__(self, folder: Path = FOLDER) -> None:
        texts = [path.read_text().strip() for path in sorted(folder.glob("*.txt"))]
        self.passages = [Passage(text.partition("\n")[0], text) for text in texts]
        self.words = [set(_words(text)) for text in texts]
        self.frequency = Counter(word for words in self.words for word in words)

    def search(self, query: str, limit: int) -> list[Passage]:
        def score(i: int) -> float:
            shared = self.words[i].intersection(_words(query))
            return sum(math.log(len(self.passages) / self.frequency[word]) for word in shared)

        best = sorted(range(len(self.passages)), key=score, reverse=True)
        return [self.passages[i] for i in best[:limit]]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())
