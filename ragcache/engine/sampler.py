"""Logits to tokens.

One uniform number per (seed, choice, position) drives inverse-transform sampling, so a token
depends on its own logits and on nothing else: not on the batch, not on preemption, not on the
order in which requests arrive.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ragcache.engine.logprobs import token_logprobs
from ragcache.engine.request import Sequence
from ragcache.types import SamplingParams, TokenLogprob

COLDEST = 1e-5  # below this temperature only the most likely token is left
CANDIDATES = 1024  # most nuclei fit in these; a wider one costs a full sort
LOWEST = torch.finfo(torch.float32).min  # as good as forbidden, but better than not allowed


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token, with log-probabilities where the request asked for them."""

    token_id: int
    logprob: TokenLogprob | None = None


@torch.inference_mode()
def sample(logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
    """Choose the next token of each sequence from its row of `logits` `[S', V]`.

    The logits are overwritten; they hold no NaN. Filters apply in the order of the field's other
    engines: penalties and bias, grammar, temperature, top-k, top-p, min-p.
    """
    logits = logits.float()
    logprobs = _Logprobs(logits, sequences)
    for row, sequence in zip(logits, sequences, strict=True):
        _adjust(row, sequence)
    _constrain(logits, sequences)
    tokens = _most_likely(logits)
    for i, sequence in enumerate(sequences):
        if sequence.request.sampling.temperature >= COLDEST:
            tokens[i] = _draw(logits[i], sequence)
    return [Sampled(token, logprobs.of(i, token)) for i, token in enumerate(tokens)]


def _most_likely(logits: Tensor) -> list[int]:
    if logits.device.type == "cpu":  # numpy's argmax is nine times faster here
        return [int(token) for token in logits.numpy().argmax(axis=-1)]
    return logits.argmax(dim=-1).tolist()


class _Logprobs:
    """Log-probabilities of the unmodified logits, only for the rows that report them."""

    def __init__(self, logits: Tensor, sequences: list[Sequence]) -> None:
        wanted = [(i, s.request.sampling.logprobs) for i, s in enumerate(sequences)]
        self._tops = {i: top for i, top in wanted if top is not None}
        self._rows = {i: logits[i].log_softmax(dim=-1) for i in self._tops}

    def of(self, index: int, token_id: int) -> TokenLogprob | None:
        if index not in self._rows:
            return None
        return token_logprobs(self._rows[index][None], [token_id], self._tops[index])[0]


def _adjust(row: Tensor, sequence: Sequence) -> None:
    """Apply penalties, bias and the minimum length to one row, in place."""
    sampling = sequence.request.sampling
    if sampling.repetition_penalty != 1:
        ids = torch.tensor(list(set(sequence.tokens)), device=row.device)
        seen = row[ids]
        penalty = sampling.repetition_penalty
        row[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and sequence.num_output:
        counts = Counter(sequence.output)
        ids = torch.tensor(list(counts), device=row.device)
        times = torch.tensor(list(counts.values()), device=row.device)
        row[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(sampling.logit_bias.values()), device=row.device)
    if sequence.num_output < sampling.min_tokens:
        request = sequence.request
        row[list(request.eos_token_ids | sampling.stop_token_ids)] = -torch.inf


def _constrain(logits: Tensor, sequences: list[Sequence]) -> None:
    """Forbid, in place, what the grammars of the batch do not allow.

    The grammar comes last and wins: of its tokens one is chosen even if all are forbidden.
    """
    rows = [(i, s.constraint) for i, s in enumerate(sequences) if s.constraint is not None]
    if not rows:
        return
    vocab_size = logits.shape[1]
    bits = np.zeros((len(rows), -(-vocab_size // 32)), dtype=np.int32)
    for words, (_, constraint) in zip(bits, rows, strict=True):
        constraint.fill_mask(words)
    octets = torch.from_numpy(bits.view(np.uint8)).to(logits.device)
    bounds = _bounds_of_octets(logits.device).index_select(0, octets.int().flatten())
    for bound, (i, _) in zip(bounds.view(len(rows), -1), rows, strict=True):
        row = logits[i].clamp_(min=LOWEST)
        torch.minimum(row, bound[:vocab_size], out=row)


@cache
def _bounds_of_octets(device: torch.device) -> Tensor:
    """Upper bounds for the logits of 8 tokens, `[256, 8]`: infinity where a bit is set.

    Looking bits up and taking minima is several times faster on a CPU than shifts and
    `torch.where`.
    """
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits.bool(), torch.inf, -torch.inf).to(device)


def _draw(row: Tensor, sequence: Sequence) -> int:
    sampling = sequence.request.sampling
    best = row.max()
    if best <= LOWEST:  # every token is forbidden: none is better than another
        return int(row.argmax())
    scaled = (row - best) / sampling.temperature  # shifted first: a small divisor is safe
    probs = scaled.softmax(dim=-1)
    ids: Tensor | None = None
    if sampling.top_k or sampling.top_p < 1:
        probs, ids = _nucleus(probs, sampling)
    if sampling.min_p > 0:
        probs = torch.where(probs < sampling.min_p * probs.max(), 0.0, probs)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    threshold = cumulative[-1] * _uniform(sequence)
    choice = torch.searchsorted(cumulative, threshold, right=True).clamp(max=len(probs) - 1)
    return int(choice if ids is None else ids[choice])


def _nucleus(probs: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """The top-k tokens, then of these the smallest set that holds `top_p` of their mass.

    Holtzman et al., ICLR 2020. Returns probabilities, largest first, and their token ids.
    """
    size = len(probs)
    count = min(sampling.top_k or CANDIDATES, size)
    top, ids = probs.topk(count)
    if not sampling.top_k and top.sum() < sampling.top_p:
        top, ids = probs.sort(descending=True)
    if sampling.top_p < 1:
        mass = top.sum() if sampling.top_k else 1.0
        before = top.cumsum(dim=-1) - top
        kept = max(1, int((before < sampling.top_p * mass).sum()))
        top, ids = top[:kept], ids[:kept]
    return top, ids


def _uniform(sequence: Sequence) -> float:
    """A number in [0, 1) that is a function of seed, choice and position alone."""
    key = struct.pack("<QII", sequence.request.seed, sequence.index, sequence.num_output)
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)
