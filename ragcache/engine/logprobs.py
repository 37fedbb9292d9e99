"""Log-probabilities of given tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ragcache.types import TokenLogprob

ROWS = 64  # turned into float32 log-probabilities at once


def token_logprobs(logprobs: Tensor, token_ids: list[int], top: int) -> list[TokenLogprob]:
    """One entry for each row of `logprobs` `[N, V]` and its token, with `top` alternatives."""
    values, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device)[:, None])[:, 0]
    rows = zip(token_ids, chosen.tolist(), ids.tolist(), values.tolist(), strict=True)
    return [TokenLogprob(token, one, tuple(zip(*best, strict=True))) for token, one, *best in rows]


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, token_ids: list[int], top: int) -> list[TokenLogprob]:
    """The same from the first N rows of `logits` `[N or more, V]`, each in front of its token."""
    entries: list[TokenLogprob] = []
    for start in range(0, len(token_ids), ROWS):
        tokens = token_ids[start : start + ROWS]
        rows = logits[start : start + len(tokens)].float().log_softmax(dim=-1)
        entries += token_logprobs(rows, tokens, top)
    return entries
