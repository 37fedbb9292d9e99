"""Every sampling parameter on a real forward pass: no harm to the engine, none to the cache."""

import pytest

PROMPT = [5, 17, 40, 8, 8, 61, 33, 90, 12]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.8, "seed": 4, "top_p": 0.5, "top_k": 7, "min_p": 0.01},
        {"temperature": 0.0, "logit_bias": {3: 100.0}},
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 1.5},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": frozenset([40])},
        {"temperature": 0.0, "logprobs": 5},
    ],
)
def test_warm_and_cold_agree(llama, options):
    def answer(engine):
        return llama.run(engine, {"a": PROMPT}, 6, **options)

    engine = llama.engine()
    cold, warm = answer(engine), answer(engine)
    assert engine.stats.hit_tokens == 8
    assert cold == warm == answer(llama.engine(share=False))
    if "logit_bias" in options:
        assert cold == {"a": [3] * 6}
