"""Histories that are cut to what fits: counted exactly, however long they have become."""

from __future__ import annotations

import random

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, trim_messages

from ragcache.bench.prose import prose

CONTEXT = 8192
RULES = SystemMessage("You answer from the passages only.")


def test_a_history_of_many_contexts_is_trimmed_to_one(model):
    text = prose(random.Random(1), 600)
    turns = [(HumanMessage(f"{turn}: {text}"), AIMessage(text)) for turn in range(30)]
    history = [RULES, *(message for turn in turns for message in turn)]
    assert model.get_num_tokens_from_messages(history) > 5 * CONTEXT

    def trimmed(max_tokens):
        return trim_messages(
            history,
            max_tokens=max_tokens,
            token_counter=model,
            include_system=True,
            start_on="human",
        )

    kept = trimmed(CONTEXT - 200)
    assert kept == [RULES, *history[1 - len(kept) :]]
    assert model.invoke(kept[:-1]).usage_metadata["input_tokens"] < CONTEXT - 200
    one_more_turn = [RULES, *history[-1 - len(kept) :]]
    assert model.get_num_tokens_from_messages(one_more_turn) > CONTEXT - 200
