"""What is hit, what is missed, and what is said about it."""

import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from json import dumps

import pytest

from ragcache.bench.prose import prose

BLOCK = 16
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
TOOL = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


def words(seed, count):
    return prose(random.Random(seed), count)


def logged(caplog, response_id):
    """The line of a request, which may come after its answer."""
    deadline = time.monotonic() + 30
    while not (lines := [each for each in caplog.messages if response_id in each]):
        assert time.monotonic() < deadline, f"no line of {response_id}"
        time.sleep(0.01)
    return lines[0]


def whole(tokens):
    return tokens // BLOCK * BLOCK


def post(gateway, path, **body):
    response = gateway.http.post(path, json={"model": "tiny", "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    return response.json()


def hit(answer):
    """Tokens of the prompt, and those read from the cache."""
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def complete(gateway):
    """Completes a raw prompt; returns its tokens and those read."""
    return lambda prompt: hit(post(gateway, COMPLETIONS, prompt=prompt))


@pytest.fixture
def explained(gateway):
    """Asks in a chat; returns the explanation of what was not hit."""

    def explained(messages, **fields):
        asked = {"explain": True} | fields.pop("ragcache", {})
        answer = post(gateway, CHAT, messages=messages, ragcache=asked, **fields)
        return answer["ragcache"] | {"id": answer["id"]}

    return explained


def chat(system, *turns):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return [{"role": "system", "content": system}, *messages]


def test_sharing_less_than_a_block_is_told_from_sharing_nothing(gateway):
    before = gateway.metrics()
    shared = list(range(100, 100 + BLOCK - 3))
    prompts = [[*shared, *[1000 + i] * 40] for i in range(5)] + [[2000 + i] * 40 for i in range(5)]
    reasons = []
    for prompt in prompts:
        answer = post(gateway, COMPLETIONS, prompt=prompt, ragcache={"explain": True})
        assert hit(answer)[1] == 0
        assert answer["ragcache"]["block_size"] == BLOCK
        reasons.append(answer["ragcache"]["reason"])
    assert reasons == ["cold"] + ["below_block"] * 4 + ["cold"] * 5
    after = gateway.metrics()
    for reason, times in (("below_block", 4), ("cold", 6)):
        name = f'ragcache_cache_miss_reason_total{{model_name="tiny",reason="{reason}"}}'
        assert after[name] - before.get(name, 0) == times
    assert any(f'block_size="{BLOCK}"' in name for name in after)
    assert gateway.http.get("/cache/stats").json()["block_size"] == BLOCK


def test_counters_never_go_back(gateway, complete):
    for _ in range(10):
        complete(words(1, 60))
    name = 'ragcache_prefix_cache_%s_tokens_total{model_name="tiny"}'
    first = gateway.metrics()
    assert first[name % "hit"] > 0
    complete(words(2, 60))
    second = gateway.metrics()
    assert second[name % "hit"] == first[name % "hit"]
    assert second[name % "query"] > first[name % "query"]
    page = gateway.http.get("/metrics").text
    for each in ("hit", "query"):
        assert f"# TYPE ragcache_prefix_cache_{each}_tokens_total counter" in page


def test_a_clock_in_the_system_prompt_is_pointed_at(explained, caplog):
    caplog.set_level(logging.INFO, "ragcache")
    system, question = words(3, 300), words(4, 20)
    first = explained(chat(f"Now 10:15:07. {system}", question))
    second = explained(chat(f"Now 10:15:09. {system}", question))
    assert (second["hit_tokens"], second["reason"]) == (0, "changed")
    assert (second["segment"], second["previous"]) == ("system", first["id"])
    assert second["character"] == len("Now 10:15:0")
    assert second["lost_tokens"] == whole(first["prompt_tokens"] - 1)
    line = logged(caplog, second["id"])
    assert "system" in line
    assert "character 11" in line


def test_a_clock_in_the_last_message_costs_nothing(explained):
    system = words(3, 300)
    explained(chat(system, "It is 10:15:07. " + words(4, 20)))
    second = explained(chat(system, "It is 10:15:09. " + words(4, 20)))
    assert second["hit_tokens"] > 300
    assert second["lost_tokens"] < 3 * BLOCK


BILLING = "x-anthropic-billing-header: cc_version=1.2.3; cc_entrypoint=cli; cch=%05x;"


@pytest.mark.parametrize("as_blocks", [True, False])
def test_billing_lines_are_no_part_of_the_prompt(gateway, as_blocks):
    def ask(number, question="hi"):
        parts = BILLING % number, words(5, 200)
        blocks = [{"type": "text", "text": part} for part in parts]
        body = {"system": blocks if as_blocks else "\n".join(parts)}
        messages = [{"role": "user", "content": question}]
        usage = post(gateway, MESSAGES, messages=messages, **body)["usage"]
        return usage["input_tokens"], usage["cache_read_input_tokens"]

    fresh, read = ask(1)
    assert read == 0
    assert ask(0xFFFFF) == (fresh - whole(fresh - 1), whole(fresh - 1))
    assert sum(ask(1, f"{BILLING % 1}\nhi")) > fresh + BLOCK


def tools(*names, **fields):
    return [
        {"type": "function", "function": {"name": name, "description": words(6, 12), **fields}}
        for name in names
    ]


def test_the_order_of_tools_and_of_keys_is_kept_and_named_as_the_reason(explained):
    ask = chat(words(7, 60), "hi")
    explained(ask, tools=tools("a", "b", "c", parameters=TOOL))
    same = explained(ask, tools=tools("a", "b", "c", parameters=TOOL))
    assert (same["reason"], same["lost_tokens"]) == (None, 0)
    reversed_keys = TOOL | {"properties": dict(reversed(TOOL["properties"].items()))}
    for changed in (
        tools("c", "a", "b", parameters=TOOL),
        tools("a", "b", "c", parameters=reversed_keys),
    ):
        other = explained(ask, tools=changed)
        assert (other["reason"], other["segment"]) == ("changed", "tools")
        assert other["lost_tokens"] > 0


def test_white_space_in_the_json_of_a_request_changes_nothing(gateway):
    body = {"model": "tiny", "max_tokens": 4, "messages": chat(words(8, 60), "hi")}
    body["tools"] = tools("a", "b", parameters=TOOL)
    compact, wide = (
        gateway.http.post(CHAT, content=dumps(body, **layout)).json()
        for layout in ({"separators": (",", ":")}, {"indent": 7})
    )
    assert hit(wide) == (hit(compact)[0], whole(hit(compact)[0] - 1))


def test_other_prompts_in_between_wipe_nothing(complete):
    total, read = complete(words(9, 600))
    assert (read, total > 40 * BLOCK) == (0, True)
    for number in range(10):
        assert complete(words(100 + number, 100))[1] == 0
    assert complete(words(9, 600)) == (total, whole(total - 1))


def test_the_longest_common_prefix_is_hit_wherever_another_prompt_went_on(complete):
    shared = list(range(100, 100 + 5 * BLOCK + 3))
    complete([*shared, *range(50)])
    assert complete([*shared, *range(60, 90)])[1] == whole(len(shared))
    middle = 2 * BLOCK + BLOCK // 2
    assert complete(shared[:middle])[1] == whole(middle)
    assert complete([*shared[:middle], 7, 8])[1] == whole(middle)


def test_a_burst_computes_and_keeps_its_prefix_once(gateway):
    shared, tail = list(range(100, 100 + 60 * BLOCK)), 3 * BLOCK
    before = gateway.at_rest().pool.cached

    def ask(number):
        return hit(post(gateway, COMPLETIONS, prompt=[*shared, *[number] * tail], max_tokens=1))

    with ThreadPoolExecutor(8) as pool:
        burst = list(pool.map(ask, range(8)))
    computed = sum(total - read for total, read in burst)
    assert computed <= 2 * len(shared) + 8 * tail
    kept = gateway.at_rest().pool.cached - before
    assert kept <= (len(shared) + 8 * tail) // BLOCK


def test_an_idle_cache_is_neither_empty_nor_in_use(gateway, complete):
    complete(words(10, 60))
    gateway.at_rest()
    metrics = gateway.metrics()
    free, cached, held = (
        metrics[f'ragcache_kv_blocks{{model_name="tiny",state="{state}",tier="device"}}']
        for state in ("free", "cached", "held")
    )
    assert (held, free + cached) == (0, gateway.serving.stats().pool.total)
    assert cached > 0
    assert metrics['ragcache_kv_usage_ratio{model_name="tiny"}'] == 0


def test_the_reason_of_a_miss_is_named_to_anthropics_client(gateway):
    tool = {"name": "a", "description": words(11, 40), "input_schema": TOOL}
    system, question = words(12, 60), [{"role": "user", "content": words(13, 40)}]

    def ask(previous, system=system, messages=question, **changes):
        return gateway.anthropic.messages.create(
            model="tiny",
            max_tokens=4,
            tools=[tool | changes],
            system=system,
            messages=messages,
            diagnostics={"previous_message_id": previous},
        )

    first = ask(None)
    assert first.diagnostics is None
    answer = {"role": "assistant", "content": first.content}
    goes_on = [*question, answer, {"role": "user", "content": "and?"}]
    cases = [
        (ask(first.id, description="another"), "tools_changed"),
        (ask(first.id, system=system.replace(" ", "  ", 1)), "system_changed"),
        (ask(first.id, messages=[{"role": "user", "content": words(14, 40)}]), "messages_changed"),
        (ask("msg_of_nobody"), "previous_message_not_found"),
    ]
    for message, expected in cases:
        assert message.diagnostics.cache_miss_reason.type == expected
    for message, _ in cases[:3]:
        assert message.diagnostics.cache_miss_reason.cache_missed_input_tokens > BLOCK
    assert ask(first.id, messages=goes_on).diagnostics is None
