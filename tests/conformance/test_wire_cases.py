"""What both wires promise, kept by the whole gateway: streams, ends, errors, limits."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragcache.bench.prose import prose
from ragcache.config import ServeSettings

BLOCK, LIMIT = 16, 1000
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
HERE = {"cache_control": {"type": "ephemeral"}}
FUNCTION = {"name": "find", "parameters": {"type": "object", "properties": {}}}
SAID = "It is said that you will see a lighthouse."
CALL = '<tool_call>[{"name": "find", "arguments": {}}]</tool_call>'


def words(seed, count):
    return prose(random.Random(seed), count)


def whole(tokens):
    return tokens // BLOCK * BLOCK


def ask(text="hello", **fields):
    return {
        "model": "tiny",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": text}],
        **fields,
    }


def total(usage):
    read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    return usage["input_tokens"] + read + written


@pytest.fixture
def post(gateway):
    """Posts a body; returns the answer, which must have the status."""

    def post(path, body, status=200):
        response = gateway.http.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    return post


def test_a_stream_of_anthropics_has_the_cache_counters_at_both_ends(gateway, post):
    body = ask(words(1, 60), system=[{"type": "text", "text": words(2, 60), **HERE}])
    post(MESSAGES, body)
    whole_usage = post(MESSAGES, body)["usage"]
    start, *_, end, _ = gateway.events(MESSAGES, body)
    first, last = start["message"]["usage"], end["usage"]
    assert last == whole_usage
    assert first | {"output_tokens": last["output_tokens"]} == last
    assert last["cache_read_input_tokens"] > 100
    assert last["output_tokens"] > 0


@pytest.mark.parametrize("said", [SAID, f"Well. {CALL}"])
@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": FUNCTION}]])
@pytest.mark.parametrize("limit", [1, 5, 50])
def test_every_choice_of_a_stream_ends_once_and_last(gateway, limit, tools, said):
    gateway.script.text = said
    body = ask(max_tokens=limit, n=2, stream_options={"include_usage": True})
    *chunks, usage = gateway.events(CHAT, body | ({"tools": tools} if tools else {}))
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] <= 2 * limit
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    called = bool(tools) and "<" in said and limit == 50
    for index in range(2):
        choices = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        first, *others, last = choices
        assert first["delta"]["role"] == "assistant"
        assert not any("role" in choice["delta"] for choice in others)
        assert not any(choice["finish_reason"] for choice in choices[:-1])
        natural = "tool_calls" if called else "stop"
        assert (last["delta"], last["finish_reason"]) == ({}, natural if limit == 50 else "length")
        assert any("tool_calls" in choice["delta"] for choice in others) == called


REFUSED = {
    "no messages": ask() | {"messages": []},
    "no role": ask() | {"messages": [{"content": words(3, 60)}]},
    "a number as content": ask() | {"messages": [{"role": "user", "content": 5}]},
    "tools that are no list": ask(tools={}),
    "no such model": ask(model="nobody"),
    "less than no output": ask(max_tokens=-1),
    "what one route alone has": ask(n=0, stop_sequences=[""]),
}
SERVED = {
    "two turns of the user": [ask()["messages"][0]] * 2,
    "system in the middle": [*ask()["messages"], {"role": "system", "content": "Be brief."}],
}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_bad_input_is_the_clients_error_and_leaves_nothing_behind(gateway, post, path):
    free = gateway.at_rest().pool.free
    for name, body in REFUSED.items():
        status = 404 if name == "no such model" else 400
        for stream in (False, True):
            answer = post(path, body | {"stream": stream}, status)
            assert answer["error"].keys() >= {"type", "message"}
            assert (answer.get("type") == "error") == (path == MESSAGES)
    assert gateway.http.post(path, content=b'{"model": "tiny", "messages": [').status_code == 400
    assert gateway.at_rest().pool.free == free
    for messages in SERVED.values():
        post(path, ask() | {"messages": messages})


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("limit", "stops", "reason", "stop", "text"),
    [
        (50, ["never", "a light"], "stop_sequence", "a light", SAID.partition("a light")[0]),
        (50, ["never"], "end_turn", None, SAID),
        (50, [], "end_turn", None, SAID),
        (3, ["a light"], "max_tokens", None, "It is said"),
    ],
)
def test_a_stop_sequence_is_reported(gateway, streamed, limit, stops, reason, stop, text):
    body = {**ask(max_tokens=limit), "stop_sequences": stops}
    if streamed:
        with gateway.anthropic.messages.stream(**body) as stream:
            answer = stream.get_final_message()
    else:
        answer = gateway.anthropic.messages.create(**body)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, stop)
    assert answer.content[0].text == text


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_model_that_breaks_down_in_a_stream_is_an_error_and_no_end(make_gateway, path):
    with make_gateway() as gateway:
        gateway.script.text = "word " * 2000
        body = ask(max_tokens=3000, stream=True)
        with gateway.http.stream("POST", path, json=body) as response:
            lines = response.iter_lines()
            seen = [next(lines) for _ in range(20)]
            gateway.script.fail = True
            seen += lines
        assert any("word" in line for line in seen)
        last = [line for line in seen if line.startswith("data: ")][-1]
        assert '"error"' in last
        assert not any('"stop"' in line or "message_stop" in line for line in seen)
        after = gateway.http.post(path, json=ask())
        assert after.status_code == 503
        assert after.headers["retry-after"]


@pytest.fixture(scope="module")
def narrow(make_gateway):
    """A gateway whose model has a context of LIMIT tokens, and one request at a time."""
    settings = ServeSettings(max_running=1, max_queue=1, max_batch_tokens=512)
    with make_gateway(max_model_len=LIMIT, settings=settings) as gateway:
        gateway.script.free = True
        yield gateway


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 1}, {"max_tokens": 10 * LIMIT}])
def test_a_prompt_must_leave_room_for_one_token_of_the_output(narrow, limit):
    fits = [200 + i for i in range(LIMIT - 1)]
    body = {"model": "tiny", **limit}
    answer = narrow.http.post(COMPLETIONS, json={**body, "prompt": fits}).json()
    assert answer["usage"]["prompt_tokens"] == LIMIT - 1
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    for length in (LIMIT, LIMIT + 1):
        response = narrow.http.post(COMPLETIONS, json={**body, "prompt": [*fits, 5, 5][:length]})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert str(LIMIT) in error["message"]
        assert str(length) in error["message"]


def test_a_context_that_fills_up_is_told_from_a_limit(narrow):
    full = narrow.http.post(MESSAGES, json=ask(max_tokens=10 * LIMIT)).json()
    assert full["stop_reason"] == "model_context_window_exceeded"
    assert total(full["usage"]) + full["usage"]["output_tokens"] == LIMIT
    assert narrow.http.post(MESSAGES, json=ask()).json()["stop_reason"] == "max_tokens"
    refused = narrow.http.post(MESSAGES, json=ask(words(4, LIMIT)))
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
    assert "prompt is too long" in error["message"]


def test_tokens_are_counted_while_the_engine_is_full(narrow):
    counted = narrow.http.post(COUNT, json=ask(words(5, 20))).json()["input_tokens"]
    before = narrow.at_rest().query_tokens
    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(narrow.http.post, MESSAGES, json=ask(max_tokens=900)) for _ in range(2)]
        while (stats := narrow.serving.stats()).running + stats.waiting < 2:
            assert not all(each.done() for each in busy)
        narrow.script.go.clear()
        assert narrow.http.post(MESSAGES, json=ask()).status_code == 429
        assert narrow.http.post(COUNT, json=ask(words(5, 20))).json() == {"input_tokens": counted}
        assert narrow.serving.stats().waiting == 1
        narrow.script.go.set()
    prompts = [total(each.result().json()["usage"]) for each in busy]
    assert narrow.at_rest().query_tokens - before == sum(prompts)  # what was counted took no block


def test_several_choices_prefill_their_prompt_once(gateway, post):
    gateway.script.free = True
    body = ask(words(6, 60), n=3, temperature=1, seed=1, max_tokens=6)
    before = gateway.at_rest().computed_tokens
    cold = post(CHAT, body)
    usage = cold["usage"]
    assert (usage["completion_tokens"], len(cold["choices"])) == (18, 3)
    decoded = 3 * 6  # and the last token of each is never computed
    assert gateway.at_rest().computed_tokens - before <= usage["prompt_tokens"] + decoded
    texts = [""] * 3
    for chunk in gateway.events(CHAT, body):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in cold["choices"]]
    assert len(set(texts)) == 3


def test_nothing_needs_to_be_said_to_write_the_cache(gateway, post):
    system = [{"type": "text", "text": words(7, 200), **HERE}]
    warming = post(MESSAGES, ask("x", system=system, max_tokens=0))
    assert (warming["content"], warming["stop_reason"]) == ([], "max_tokens")
    usage = warming["usage"]
    assert (usage["output_tokens"], usage["cache_read_input_tokens"]) == (0, 0)
    assert usage["cache_creation_input_tokens"] > 200
    read = post(MESSAGES, ask(words(8, 20), system=system))["usage"]["cache_read_input_tokens"]
    assert read >= usage["cache_creation_input_tokens"]
    tool = {"name": "find", "input_schema": FUNCTION["parameters"]}
    any_tool = {"tools": [tool], "tool_choice": {"type": "any"}}
    wanted = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}
    thoughts = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    for fields in ({"stream": True}, any_tool, wanted, thoughts):
        post(MESSAGES, ask("x", max_tokens=0) | fields, 400)


@pytest.mark.parametrize(("count", "written"), [(3, 0), (30, 2 * BLOCK)])
def test_a_marker_below_a_block_writes_nothing(post, count, written):
    system = [{"type": "text", "text": words(9, count), **HERE}]
    usage = post(MESSAGES, ask(system=system))["usage"]
    assert usage["cache_read_input_tokens"] == 0
    assert usage["cache_creation_input_tokens"] == written
