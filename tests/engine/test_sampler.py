"""From logits to tokens: every parameter has its effect and no other."""

from collections import Counter

import pytest
import torch

from ragcache.engine import sampler
from ragcache.engine.request import Request, Sequence
from ragcache.engine.sampler import Sampled
from ragcache.engine.sampler import sample as sample_rows
from ragcache.types import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, -2.0])


def sequence(prompt=(0,), output=(), index=0, eos=(), grammar=None, **options) -> Sequence:
    sampling = SamplingParams(100, **options)
    request = Request("r", list(prompt), sampling, b"n", frozenset(eos), grammar)
    result = Sequence(request, index)
    result.tokens += output
    return result


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
    chosen, broken = sample_rows(logits, sequences, list(range(len(sequences))))
    assert broken == [False] * len(logits)
    return chosen


def draw(count=3000, logits=LOGITS, **options) -> Counter:
    rows = [sequence(output=[0] * i, seed=7, **options) for i in range(count)]
    return Counter(each.token_id for each in sample(logits.repeat(count, 1), rows))


def one(logits=LOGITS, **options):
    return sample(logits.clone()[None], [sequence(**{"temperature": 0.0, **options})])[0]


def test_temperature_zero_is_greedy():
    assert one().token_id == 4


def test_frequencies_follow_the_softmax():
    counts = draw(temperature=1.0)
    for token, probability in enumerate(LOGITS.softmax(0).tolist()):
        assert counts[token] / 3000 == pytest.approx(probability, abs=0.03)


def test_temperature_sharpens_and_flattens():
    assert draw(temperature=0.3)[4] > draw(temperature=1.0)[4] > draw(temperature=3.0)[4]


@pytest.mark.parametrize("temperature", [1e-9, 1e-40])
def test_a_tiny_temperature_is_greedy(temperature):
    assert set(draw(20, temperature=temperature)) == {4}


def test_top_k_keeps_the_k_most_likely():
    assert set(draw(temperature=2.0, top_k=2)) == {4, 0}
    assert set(draw(50, temperature=2.0, top_k=1)) == {4}


def test_top_k_beyond_the_vocabulary_is_no_filter():
    assert draw(temperature=1.0, top_k=1000) == draw(temperature=1.0, top_k=6)


def test_top_p_keeps_the_smallest_set_that_holds_the_mass():
    # Probabilities, largest first: 0.633, 0.233, 0.086, 0.032, 0.012, 0.004
    assert set(draw(temperature=1.0, top_p=0.6)) == {4}
    assert set(draw(temperature=1.0, top_p=0.64)) == {4, 0}
    assert set(draw(temperature=1.0, top_p=0.9)) == {4, 0, 1}


def test_top_p_counts_the_mass_that_top_k_left():
    # After top_k=3 token 4 alone holds 0.665 of the mass.
    assert set(draw(temperature=1.0, top_k=3, top_p=0.66)) == {4}
    assert set(draw(temperature=1.0, top_k=3, top_p=0.67)) == {4, 0}


def test_a_nucleus_wider_than_the_shortlist_is_sorted_whole():
    flat = torch.zeros(4000)
    flat[3999] = 1.0
    assert len(draw(3000, logits=flat, temperature=1.0, top_p=0.99)) > 1024


def test_min_p_is_relative_to_the_most_likely():
    # 0.233 / 0.633 = 0.368 and 0.086 / 0.633 = 0.135
    assert set(draw(temperature=1.0, min_p=0.37)) == {4}
    assert set(draw(temperature=1.0, min_p=0.2)) == {4, 0}


def test_a_seed_repeats_and_choices_differ():
    rows = [sequence(temperature=1.5, seed=3, index=index) for index in range(40)]
    first = [each.token_id for each in sample(LOGITS.repeat(40, 1), rows)]
    again = [each.token_id for each in sample(LOGITS.repeat(40, 1), rows)]
    assert first == again
    assert len(set(first)) > 1


def test_negative_seeds_are_accepted():
    assert draw(5, temperature=1.0) == draw(5, temperature=1.0)
    assert sample(LOGITS[None].clone(), [sequence(seed=-1, temperature=1.0)])


def test_logit_bias_forces_and_forbids():
    assert one(logit_bias={5: 100.0}).token_id == 5
    assert one(logit_bias={4: -100.0}).token_id == 0


def test_presence_penalty_counts_output_once_and_the_prompt_never():
    assert one(prompt=[4, 4], presence_penalty=2.0).token_id == 4
    assert one(output=[4, 4, 4], presence_penalty=0.9).token_id == 4
    assert one(output=[4], presence_penalty=1.1).token_id == 0


def test_frequency_penalty_grows_with_each_repetition():
    assert one(output=[4], frequency_penalty=0.6).token_id == 4
    assert one(output=[4, 4], frequency_penalty=0.6).token_id == 0


def test_repetition_penalty_covers_the_prompt_and_both_signs():
    assert one(prompt=[4], repetition_penalty=2.0).token_id == 0
    negative = torch.tensor([-1.0, -1.5, -9.0])
    assert one(logits=negative, prompt=[0], repetition_penalty=2.0).token_id == 1


def test_min_tokens_forbids_the_end_until_reached():
    assert one(eos=[4], min_tokens=1).token_id == 0
    assert one(eos=[4], output=[1], min_tokens=1).token_id == 4
    assert one(stop_token_ids=frozenset([4]), min_tokens=1).token_id == 0


def test_logprobs_are_of_the_unmodified_logits():
    sampled = one(logprobs=2, logit_bias={5: 100.0})
    expected = LOGITS.log_softmax(0)
    assert sampled.logprob.token_id == 5
    assert sampled.logprob.logprob == pytest.approx(float(expected[5]))
    assert [token for token, _ in sampled.logprob.top] == [4, 0]
    assert sampled.logprob.top[0][1] == pytest.approx(float(expected[4]))


def test_no_logprobs_unless_asked_and_zero_alternatives_are_possible():
    assert one().logprob is None
    assert one(logprobs=0).logprob.top == ()


def test_rows_do_not_influence_each_other():
    rows = [
        sequence(temperature=0.0, logit_bias={5: 100.0}),
        sequence(temperature=0.0),
        sequence(temperature=1.0, seed=9),
    ]
    mixed = [each.token_id for each in sample(LOGITS.repeat(3, 1), rows)]
    alone = [sample(LOGITS[None].clone(), [row])[0].token_id for row in rows]
    assert mixed == alone == [5, 4, alone[2]]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-300, "top_p": 0.9},
        {"temperature": 2.0, "top_p": 5e-324, "top_k": 2},
        {"temperature": 1.0, "top_k": 10**9, "min_p": 1.0},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 0.01},
        {"temperature": 1.0, "min_tokens": 9, "eos": range(6)},
        {"temperature": 1.0, "logprobs": 20},
        {"temperature": 1.0, "seed": 2**63, "logit_bias": dict.fromkeys(range(6), -100.0)},
    ],
)
def test_extreme_values_still_give_a_token(options):
    assert 0 <= sample(LOGITS[None].clone(), [sequence(**options)])[0].token_id < 6


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100])
def test_every_token_of_a_vocabulary_can_be_the_allowed_one(steps, vocab):
    rows = [sequence(temperature=0.0, grammar=steps([{token}])) for token in range(vocab)]
    sampled = sample(torch.randn(vocab, vocab), rows)
    assert [each.token_id for each in sampled] == list(range(vocab))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_wins_over_everything_that_forbids(steps, temperature):
    options = {"temperature": temperature, "grammar": steps([{2, 5}]), "seed": 1}
    hidden = torch.full((6,), -torch.inf)
    hidden[0] = 1.0
    for logits, rules in (
        (LOGITS, {"min_tokens": 9, "eos": [2, 5]}),
        (LOGITS, {"logit_bias": {2: -torch.inf, 5: -torch.inf}}),
        (hidden, {}),
    ):
        assert one(logits=logits, **rules, **options).token_id in {2, 5}


def test_constrained_frequencies_follow_the_softmax_of_what_is_allowed(steps):
    counts = draw(logits=LOGITS, temperature=1.0, grammar=steps([{0, 1, 5}]))
    expected = LOGITS[[0, 1, 5]].softmax(0).tolist()
    for token, probability in zip([0, 1, 5], expected, strict=True):
        assert counts[token] / 3000 == pytest.approx(probability, abs=0.03)
    assert counts.keys() <= {0, 1, 5}


def test_constraints_change_no_other_row(steps):
    rows = [sequence(temperature=0.8, seed=9, logprobs=3), sequence(grammar=steps([{5}]))]
    mixed = sample(LOGITS.repeat(2, 1), rows)
    assert mixed[0] == sample(LOGITS[None].clone(), rows[:1])[0]
    assert mixed[1].token_id == 5


def test_logits_of_an_inference_pass_can_be_adjusted():
    with torch.inference_mode():
        logits = LOGITS[None] * 1.0
    rows = [sequence(temperature=0.0, logit_bias={5: 100.0}, repetition_penalty=1.1)]
    assert sample(logits, rows)[0].token_id == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bfloat16_gives_the_tokens_of_the_same_numbers_in_float32(temperature):
    logits = torch.randn(50, 61, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[::2] -= 100  # negative everywhere
    logits[::3, :40] = -torch.inf
    logits[::5] = torch.zeros(61).bfloat16().copysign(logits[::5])
    rows = [sequence(temperature=temperature, seed=i, logprobs=1) for i in range(50)]
    assert sample(logits.clone(), rows) == sample(logits.float(), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_with_a_nan_are_flagged_and_no_others(dtype):
    extremes = [[-torch.inf, 1.0], [torch.inf, 0.0], [-0.0, 0.0], [-3.0, -2.0], [-torch.inf, -0.0]]
    broken = [[torch.nan, 1.0], [-torch.inf, torch.nan], [torch.inf, -torch.nan]]
    logits = torch.tensor(extremes + broken, dtype=dtype)
    rows = [sequence(temperature=0.0) for _ in logits]
    sampled, flags = sample_rows(logits, rows, list(range(len(rows))))
    assert [each.token_id for each in sampled[:5]] == [1, 0, 0, 1, 1]
    assert flags == 5 * [False] + 3 * [True]


def test_every_nan_of_bfloat16_is_flagged_and_no_other_bits():
    logits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)[:, None]
    _, flags = sample_rows(logits, [sequence(temperature=0.0)], [0])
    assert flags == logits[:, 0].isnan().tolist()


def test_only_rows_that_are_chosen_from_are_widened(monkeypatch):
    logits = torch.randn(9, 61, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows, plain, widened = [7, 2], sampler._widened, []
    sequences = [sequence(temperature=1.0, seed=i, logprobs=1) for i in range(2)]
    expected = sample_rows(logits.float(), sequences, rows)
    monkeypatch.setattr(sampler, "_widened", lambda each: widened.append(len(each)) or plain(each))
    assert sample_rows(logits, sequences, rows) == expected
    assert widened == [2]
