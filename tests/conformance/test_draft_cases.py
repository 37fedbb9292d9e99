"""Whoever asks cannot tell that tokens were tried ahead."""

import pytest

from ragcache.config import ServeSettings

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SONG = "Row, row, row your boat, gently down the stream. "
SAID = f"{SONG * 4}END. {SONG * 4}"
STOPS = ["END", "stream. END", "boat, gently down the stream. R", "never said"]


@pytest.fixture(scope="module")
def gateways(make_gateway):
    """One that drafts nothing, and one that does."""
    plain, drafting = (ServeSettings(speculative_tokens=count) for count in (0, 8))
    with make_gateway(settings=plain) as one, make_gateway(settings=drafting) as other:
        one.script.text = other.script.text = SAID
        yield one, other


def ask(**fields):
    return {
        "model": "tiny",
        "max_tokens": 150,
        "messages": [{"role": "user", "content": f"Sing. {SONG}"}],
        **fields,
    }


def drafted(gateway):
    stats = gateway.at_rest()
    return stats.drafted_tokens, stats.accepted_tokens


def without_names(body):
    return {name: each for name, each in body.items() if name not in ("id", "created")}


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ask(logprobs=True, top_logprobs=2)),
        (CHAT, ask(n=2, seed=1)),
        (CHAT, ask(max_tokens=23)),
        (MESSAGES, ask(temperature=0)),
    ],
)
def test_answers_and_usage_are_the_same_whatever_ends_them(gateways, path, body, stop):
    name = "stop" if path == CHAT else "stop_sequences"
    _, before = drafted(gateways[1])
    one, other = (each.http.post(path, json={**body, name: [stop]}).json() for each in gateways)
    assert without_names(one) == without_names(other)
    assert drafted(gateways[0]) == (0, 0)
    assert drafted(gateways[1])[1] > before


@pytest.mark.parametrize("stop", STOPS)
def test_a_stream_says_nothing_behind_its_end(gateways, stop):
    said = []
    body = ask(stop=[stop], stream_options={"include_usage": True}, logprobs=True)
    for gateway in gateways:
        *chunks, last = gateway.events(CHAT, body)
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        tokens = [
            each["token"]
            for choice in choices
            for each in (choice.get("logprobs") or {}).get("content") or ()
        ]
        said.append((text, tokens, choices[-1]["finish_reason"], last["usage"]))
        assert stop not in text
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert said[0] == said[1]
