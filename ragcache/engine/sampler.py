"""Logits to tokens, on the device where the logits are: only what was chosen comes to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from ragcache_kernels import apply_masks, upload
from torch import Tensor

from ragcache.engine.draw import Draws, candidates
from ragcache.engine.logprobs import token_logprobs
from ragcache.engine.request import Sequence
from ragcache.types import TokenLogprob

COLDEST = 1e-5  # below this temperature only the most likely token is left
GREEDY = -1  # comes before all numbers of candidates


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token, with log-probabilities where the request asked for them."""

    token_id: int
    logprob: TokenLogprob | None = None


@torch.inference_mode()
def sample(
    logits: Tensor, sequences: list[Sequence], rows: list[int]
) -> tuple[list[Sampled], list[bool]]:
    """Choose the next token of each sequence from its row of `logits` `[S', V]`.

    Returns also which of the S' rows hold a NaN: what was chosen from these means nothing. Rows
    that are chosen from may be overwritten. Filters apply in the order of the field's other
    engines: penalties and bias, grammar, temperature, top-k, top-p, min-p.

    A GPU that still runs the step is waited for once, behind everything that the host works out
    itself: the masks of grammars above all take no time of their own.
    """
    broken = _holding_nan(logits)
    kinds = [_kind(sequence, logits.shape[1]) for sequence in sequences]
    order = sorted(range(len(rows)), key=kinds.__getitem__)  # so that rows of a kind lie together
    sequences = [sequences[i] for i in order]
    logits = _widened(_select(logits, [rows[i] for i in order]))
    logprobs = _Logprobs(logits, sequences)
    for i, sequence in enumerate(sequences):
        _adjust(logits, i, sequence)
    _constrain(logits, sequences)
    tokens, flags = _choose(logits, sequences, kinds.count(GREEDY), broken)
    sampled = dict(zip(order, logprobs.join(tokens), strict=True))
    return [sampled[i] for i in range(len(rows))], flags


def _kind(sequence: Sequence, vocab_size: int) -> int:
    """How many candidates a token is drawn from, or `GREEDY`."""
    sampling = sequence.request.sampling
    return GREEDY if sampling.temperature < COLDEST else candidates(sampling, vocab_size)


def _select(logits: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(len(logits))):
        return logits
    return logits.index_select(0, upload(np.array(rows, dtype=np.int64), logits.device))


def _choose(
    logits: Tensor, sequences: list[Sequence], num_greedy: int, broken: Tensor
) -> tuple[list[int], list[bool]]:
    """Tokens, of which the first are greedy, and the flags `broken`, which come along."""
    likeliest = _likeliest(logits)
    results, draws = [likeliest], None
    if num_greedy < len(sequences):
        rest = slice(num_greedy, None)
        draws = Draws(logits[rest], likeliest[rest], sequences[rest])
        results = [likeliest[:num_greedy], draws.tokens, draws.unsettled]
    values = torch.cat([*results, broken]).tolist()  # here the host waits
    tokens = values[: len(sequences)]
    flags = values[len(values) - len(broken) :]
    unsettled = values[len(sequences) : len(values) - len(broken)]
    if draws is not None and any(unsettled):
        wide = [i for i, flag in enumerate(unsettled) if flag]
        for i, token in zip(wide, draws.settle(wide), strict=True):
            tokens[num_greedy + i] = token
    return tokens, [bool(flag) for flag in flags]


# On a CPU numpy is many times faster: it wakes no threads for a few rows.


def _holding_nan(logits: Tensor) -> Tensor:
    """Which rows do; nothing is copied, for a prompt's log-probabilities take many rows."""
    if logits.device.type != "cpu":
        return logits.amax(dim=-1).isnan()  # the maximum of a row with a NaN is NaN
    if logits.dtype is not torch.bfloat16:
        return torch.from_numpy(np.isnan(logits.numpy().max(axis=-1)))
    halves = logits.view(torch.int16).numpy()  # of a NaN, with either sign, beyond infinity's
    positive = halves.max(axis=-1) > 0x7F80
    return torch.from_numpy(positive | (halves.view(np.uint16).max(axis=-1) > 0xFF80))


def _widened(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu" and logits.dtype is torch.bfloat16:
        halves = logits.view(torch.int16).numpy().astype(np.int32)
        return torch.from_numpy((halves << 16).view(np.float32))
    return logits.float()


def _likeliest(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


class _Logprobs:
    """Log-probabilities of the unmodified logits, only for the rows that report them."""

    def __init__(self, logits: Tensor, sequences: list[Sequence]) -> None:
        self._rows: dict[int, dict[int, Tensor]] = {}  # by the number of alternatives
        for i, sequence in enumerate(sequences):
            top = sequence.request.sampling.logprobs
            if top is not None:
                self._rows.setdefault(top, {})[i] = logits[i].log_softmax(dim=-1)

    def join(self, tokens: list[int]) -> list[Sampled]:
        """The tokens with what is reported for them."""
        sampled = [Sampled(token) for token in tokens]
        for top, rows in self._rows.items():
            chosen = [tokens[i] for i in rows]
            entries = token_logprobs(torch.stack(list(rows.values())), chosen, top)
            for i, entry in zip(rows, entries, strict=True):
                sampled[i] = Sampled(tokens[i], entry)
        return sampled


def _adjust(logits: Tensor, i: int, sequence: Sequence) -> None:
    """Apply penalties, bias and the minimum length to row i, in place."""
    sampling, device = sequence.request.sampling, logits.device
    if sampling.repetition_penalty != 1:
        ids = _ids(set(sequence.tokens), device)
        seen = logits[i, ids]
        penalty = sampling.repetition_penalty
        logits[i, ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and sequence.num_output:
        counts = Counter(sequence.output)
        times = _floats(counts.values(), device)
        amounts = sampling.presence_penalty + sampling.frequency_penalty * times
        logits[i, _ids(counts, device)] -= amounts
    if sampling.logit_bias:
        biases = _floats(sampling.logit_bias.values(), device)
        logits[i, _ids(sampling.logit_bias, device)] += biases
    if sequence.num_output < sampling.min_tokens:
        ends = sequence.request.eos_token_ids | sampling.stop_token_ids
        logits[i].index_fill_(0, _ids(ends, device), -torch.inf)


def _ids(token_ids: Collection[int], device: torch.device) -> Tensor:
    return upload(np.fromiter(token_ids, np.int64, len(token_ids)), device)


def _floats(values: Collection[float], device: torch.device) -> Tensor:
    return upload(np.fromiter(values, np.float32, len(values)), device)


def _constrain(logits: Tensor, sequences: list[Sequence]) -> None:
    """Forbid, in place, what the grammars of the batch do not allow.

    The grammar comes last and wins: of its tokens one is chosen even if all are forbidden.
    """
    rows = [(i, s.constraint) for i, s in enumerate(sequences) if s.constraint is not None]
    if not rows:
        return
    bits = np.zeros((len(rows), -(-logits.shape[1] // 32)), dtype=np.int32)
    for words, (_, constraint) in zip(bits, rows, strict=True):
        constraint.fill_mask(words)
    apply_masks(logits, [i for i, _ in rows], bits)
