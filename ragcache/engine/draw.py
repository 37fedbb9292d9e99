"""Tokens drawn at random from their rows of logits, all rows at once, where the logits are.

One uniform number per (seed, choice, position) drives inverse-transform sampling, so a token
depends on its own logits and on nothing else: not on the batch, not on preemption, not on the
order in which requests arrive.
"""

from __future__ import annotations

import hashlib
import struct
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from ragcache_kernels import LOWEST, upload
from torch import Tensor

from ragcache.engine.request import Request, Sequence
from ragcache.types import SamplingParams

CANDIDATES = 1024  # most nuclei fit in these; a wider one costs a full sort
NEARLY_ALL = 1 - 1e-9  # of the mass: the widest nucleus that is one
SORTED_ROWS = 16  # of these at once, since a sort takes many times the memory of its row


class _Rules(NamedTuple):
    """How tokens are drawn from N rows; each `[N, 1]` float64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, sequences: list[Sequence], device: torch.device) -> _Rules:
        """The rules of the sequences, on the device by one copy."""
        each = [(s.request.sampling, _uniform(s)) for s in sequences]
        rows = [(p.temperature, p.top_k, p.top_p, p.min_p, uniform) for p, uniform in each]
        columns = np.array(rows, dtype=np.float64).T
        return cls(*upload(np.ascontiguousarray(columns), device)[..., None].unbind())

    def at(self, rows: slice | Tensor) -> _Rules:
        """Those of some rows."""
        return _Rules(*(column[rows] for column in self))


class Draws:
    """Tokens of N rows of `logits` `[N, V]`, which are overwritten, in order of `candidates`.

    `tokens` `[N]` are on the logits' device, as are the flags `unsettled` `[N]` of rows whose
    nucleus is wider than their candidates: what they get, `settle` says.
    """

    def __init__(self, logits: Tensor, likeliest: Tensor, sequences: list[Sequence]) -> None:
        self._rules = _Rules.of(sequences, logits.device)
        best = logits.gather(1, likeliest[:, None])
        logits -= best  # before the division: a small divisor is safe then
        logits /= self._rules.temperature.float()
        self._probs = logits.softmax(dim=-1)
        tokens, wide = zip(*self._groups(sequences), strict=True)
        # Where every token is forbidden none is better than another.
        ordinary = (best > LOWEST)[:, 0]
        self.tokens = torch.where(ordinary, torch.cat(tokens), likeliest)
        self.unsettled = ordinary & torch.cat(wide)

    def _groups(self, sequences: list[Sequence]) -> list[tuple[Tensor, Tensor]]:
        """Tokens and wide nuclei of rows with equally many candidates, in order."""
        counts = [candidates(s.request.sampling, self._probs.shape[1]) for s in sequences]
        drawn, stop = [], 0
        for count, rows in groupby(counts):
            start, stop = stop, stop + len(list(rows))
            probs, rules = self._probs[start:stop], self._rules.at(slice(start, stop))
            drawn.append(_from_shortlist(probs, rules, count) if count else _from_all(probs, rules))
        return drawn

    def settle(self, rows: list[int]) -> list[int]:
        """The tokens of `rows` that turned out to be unsettled."""
        starts = range(0, len(rows), SORTED_ROWS)
        return [token for i in starts for token in self._settle(rows[i : i + SORTED_ROWS])]

    def _settle(self, rows: list[int]) -> list[int]:
        index = upload(np.array(rows), self._probs.device)
        probs = self._probs[index]
        return _from_shortlist(probs, self._rules.at(index), probs.shape[1])[0].tolist()


def draw_widest(logits: Tensor) -> list[int]:
    """Tokens from rows of `logits` `[N, V]` in the way that takes the most memory.

    As if the nucleus of each row were wider than its candidates: all rows have to be sorted whole.
    """
    request = Request("", [0], SamplingParams(1, top_p=NEARLY_ALL, seed=0), b"", frozenset())
    rows = logits.float()
    draws = Draws(rows, rows.argmax(dim=-1), [Sequence(request, 0)] * len(rows))
    return draws.settle(list(range(len(rows))))


def candidates(sampling: SamplingParams, vocab_size: int) -> int:
    """The number of most likely tokens that are looked at first; 0 where any token may come."""
    if not sampling.top_k and sampling.top_p == 1 and not sampling.min_p:
        return 0
    return min(vocab_size, CANDIDATES) if sampling.top_k <= CANDIDATES else vocab_size


def _from_all(probs: Tensor, rules: _Rules) -> tuple[Tensor, Tensor]:
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    choice = torch.searchsorted(cumulative, cumulative[:, -1:] * rules.uniform, right=True)
    tokens = choice[:, 0].clamp(max=probs.shape[1] - 1)
    return tokens, torch.zeros_like(tokens, dtype=torch.bool)


def _from_shortlist(probs: Tensor, rules: _Rules, count: int) -> tuple[Tensor, Tensor]:
    """From the top-k tokens, of these the smallest set that holds `top_p` of their mass (Holtzman
    et al., ICLR 2020), and of these the ones as likely as `min_p` times the first.

    Each filter leaves the head of the `count` most likely tokens. The second result tells where
    they may leave more than these.
    """
    top, ids = _top(probs, count)
    cumulative = top.cumsum(dim=-1, dtype=torch.float64)
    limited = rules.top_k > 0
    limit = torch.where(limited, rules.top_k, count).long().clamp(max=count)
    mass = torch.where(limited, cumulative.gather(1, limit - 1), 1.0)
    goal = torch.where(rules.top_p < 1, rules.top_p * mass, torch.inf)
    inside = torch.arange(count, device=top.device) < limit
    inside &= (cumulative - top < goal) & (top >= rules.min_p * top[:, :1])
    kept = inside.sum(dim=-1, keepdim=True).clamp(min=1)
    threshold = cumulative.gather(1, kept - 1) * rules.uniform
    choice = torch.minimum(torch.searchsorted(cumulative, threshold, right=True), kept - 1)
    wide = ~limited & (kept == count) & (cumulative[:, -1:] < goal)
    return ids.gather(1, choice)[:, 0], wide[:, 0]


def _top(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most likely of each row, most likely first, and their ids.

    Of equally likely tokens the lowest comes first, whatever the device and the batch: numbers
    that are not negative sort like their bits, and with the ids behind these no two are the same.
    """
    size = probs.shape[1]
    keys = probs.view(torch.int32).long()
    keys <<= 32
    keys |= torch.arange(size - 1, -1, -1, device=keys.device)
    if probs.device.type == "cpu":  # numpy is several times faster here
        values = keys.numpy()
        values.partition(size - count, axis=-1)
        keys = torch.from_numpy(np.sort(values[:, size - count :])[:, ::-1].copy())
    else:
        keys = keys.topk(count).values
    return (keys >> 32).int().view(torch.float32), size - 1 - (keys & 0xFFFFFFFF)


def _uniform(sequence: Sequence) -> float:
    """A number in [0, 1) that is a function of seed, choice and position alone."""
    key = struct.pack("<QII", sequence.request.seed, sequence.index, sequence.num_output)
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)
