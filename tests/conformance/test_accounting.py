"""One account of a prompt on both wires: its tokens, what was read of them, what was written."""

import random
from itertools import pairwise

import pytest

from ragcache.bench.prose import prose

BLOCK = 16
SHORT = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}
SYSTEM = prose(random.Random(1), 120)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
CALL = '<tool_call>[{"name": "forecast", "arguments": %s}]</tool_call>'
TURNS = 6
FORCED = 8  # tokens at the end of a call, at most, which the grammar appends without the model


def whole(tokens):
    """The tokens in whole blocks."""
    return tokens // BLOCK * BLOCK


def marked(fields, marker):
    """The fields with Anthropic's marker, if there is one."""
    return fields | ({"cache_control": marker} if marker else {})


class Wire:
    """One API: asks the same in its own way, and reads the same from its answers."""

    def __init__(self, gateway, stream=False):
        self.gateway = gateway
        self.stream = stream

    def conversation(self, marker=None):
        """Tools, a system prompt and a question; marked, where there is a marker."""
        return self.tools(marker), self.system(marker), [self.user("How is the weather?", marker)]

    def user(self, content, marker=None):
        return {"role": "user", "content": [self.text(content, marker)]}


class OpenAIWire(Wire):
    def tools(self, marker):
        function = {"name": "forecast", "description": "Forecast.", "parameters": SCHEMA}
        return [marked({"type": "function", "function": function}, marker)]

    def system(self, marker):
        return [{"role": "system", "content": [self.text(SYSTEM, marker)]}]

    def text(self, content, marker):
        part = {"type": "text", "text": content}
        if not marker:
            return part
        here = {"mode": "explicit", "ttl": marker.get("ttl", "5m")}
        return part | {"prompt_cache_breakpoint": here}

    def results(self, message):
        calls = message.tool_calls or []
        return [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]

    def ask(self, tools, system, messages):
        """The answer's message; tokens of the prompt, read, written; tokens of the answer."""
        body = {"model": "tiny", "max_tokens": 60, "tools": tools, "messages": system + messages}
        if self.stream:
            options = {"stream_options": {"include_usage": True}}
            with self.gateway.openai.chat.completions.stream(**body, **options) as stream:
                answer = stream.get_final_completion()
        else:
            answer = self.gateway.openai.chat.completions.create(**body)
        usage, details = answer.usage, answer.usage.prompt_tokens_details
        read, written = details.cached_tokens, details.cache_write_tokens
        message = answer.choices[0].message
        return message, usage.prompt_tokens, read, written, usage.completion_tokens

    def said(self, message):
        calls = [call.to_dict(exclude_none=True) for call in message.tool_calls or []]
        content = {"role": "assistant", "content": message.content}
        return content | ({"tool_calls": calls} if calls else {})


class AnthropicWire(Wire):
    def tools(self, marker):
        tool = {"name": "forecast", "description": "Forecast.", "input_schema": SCHEMA}
        return [marked(tool, marker)]

    def system(self, marker):
        return [self.text(SYSTEM, marker)]

    def text(self, content, marker):
        return marked({"type": "text", "text": content}, marker)

    def results(self, message):
        calls = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": "rain"} for c in calls]
        return [{"role": "user", "content": results}] if results else []

    def ask(self, tools, system, messages):
        """The answer's message; tokens of the prompt, read, written; tokens of the answer."""
        client = self.gateway.anthropic.messages
        prompt = {"model": "tiny", "tools": tools, "system": system, "messages": messages}
        counted = client.count_tokens(**prompt).input_tokens
        if self.stream:
            with client.stream(**prompt, max_tokens=60) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.create(**prompt, max_tokens=60)
        usage = answer.usage
        written, read = usage.cache_creation_input_tokens, usage.cache_read_input_tokens
        assert usage.input_tokens + written + read == counted
        return answer, counted, read, written, usage.output_tokens

    def said(self, message):
        return {"role": "assistant", "content": [block.to_dict() for block in message.content]}


WIRES = pytest.mark.parametrize("wire_type", [OpenAIWire, AnthropicWire])
STREAMS = pytest.mark.parametrize("stream", [False, True])


def tool_loop(wire, turns, marker=None):
    """A conversation in which each turn calls a tool; yields what each answer costs."""
    wire.gateway.script.rules = [("", CALL % '{"city": "Łódź", "days": 3}')]
    tools, system, messages = wire.conversation(marker)
    for turn in range(turns):
        for _ in ("call", "answer"):
            message, *account = wire.ask(tools, system, messages)
            yield account
            messages += [wire.said(message), *wire.results(message)]
        messages.append(wire.user(f"And in week {turn} of the year?"))


@STREAMS
@pytest.mark.parametrize("marker", [None, SHORT, LONG])
def test_the_account_is_the_same_on_both_wires(gateway, stream, marker):
    totals = []
    for wire in (OpenAIWire(gateway, stream), AnthropicWire(gateway, stream)):
        conversation = wire.conversation(marker)
        gateway.serving._client.engine.drop(b"").result(10)
        _, total, read, written, _ = wire.ask(*conversation)
        assert read == 0
        if marker:
            assert total - 2 * BLOCK < written <= total
        _, again, read, written, _ = wire.ask(*conversation)
        assert (again, read, written) == (total, whole(total - 1), 0)
        totals.append(total)
    assert totals[0] == totals[1]


def test_without_markers_nothing_is_said_to_be_written_on_anthropics_wire(gateway):
    wire = AnthropicWire(gateway)
    assert wire.ask(*wire.conversation())[3] == 0


@pytest.mark.parametrize("order", [(OpenAIWire, AnthropicWire), (AnthropicWire, OpenAIWire)])
def test_what_one_wire_wrote_the_other_reads(gateway, order):
    first, second = (list(tool_loop(wire_type(gateway), 2)) for wire_type in order)
    assert [total for total, *_ in first] == [total for total, *_ in second]
    assert first[0][1] == 0
    assert [read for _, read, *_ in second] == [whole(total - 1) for total, *_ in second]


@STREAMS
@WIRES
def test_a_growing_conversation_with_tools_hits_all_of_the_turn_before(gateway, wire_type, stream):
    accounts = list(tool_loop(wire_type(gateway, stream), TURNS))
    assert len(accounts) == 2 * TURNS
    assert accounts[0][1] == 0
    for (before, _, _, said), (total, read, *_) in pairwise(accounts):
        assert whole(before + max(said - FORCED, 0)) <= read < total


@WIRES
def test_moving_markers_never_change_the_tokens(gateway, wire_type):
    wire = wire_type(gateway)
    tools, system, messages = wire.conversation()
    before = 0
    for turn in range(TURNS):
        question = prose(random.Random(turn), 30)
        messages[-1] = wire.user(question, SHORT)
        message, total, read, written, _ = wire.ask(tools, wire.system(LONG), messages)
        assert whole(before) <= read < total
        assert written > 0
        messages[-1] = wire.user(question)
        assert wire.ask(tools, system, messages)[1] == total
        messages += [wire.said(message), wire.user("")]
        before = total


def test_each_ttl_has_its_share_of_what_is_written(gateway):
    wire = AnthropicWire(gateway)
    tools, _, messages = wire.conversation(SHORT)
    tools = wire.tools(LONG)
    usage = wire.ask(tools, wire.system(LONG), messages)[0].usage
    split = usage.cache_creation
    assert split.ephemeral_1h_input_tokens > whole(120)  # words of the system prompt
    assert split.ephemeral_5m_input_tokens > 0
    both = split.ephemeral_1h_input_tokens + split.ephemeral_5m_input_tokens
    assert both == usage.cache_creation_input_tokens


@pytest.fixture(scope="module")
def small_gateway(make_gateway):
    """A gateway with room for 1,280 tokens."""
    with make_gateway(num_blocks=80) as gateway:
        yield gateway


@pytest.mark.parametrize("marker", [LONG, None])
@WIRES
def test_a_marked_prefix_outlives_prompts_that_never_come_again(small_gateway, wire_type, marker):
    small_gateway.serving._client.engine.drop(b"").result(10)
    evictions = small_gateway.at_rest().evictions
    wire = wire_type(small_gateway)
    tools, system, messages = wire.conversation()
    _, total, *_ = wire.ask(tools, wire.system(marker), messages)
    for number in range(5):
        once = prose(random.Random(number), 250)
        wire.ask([], [], [wire.user(f"{number}: {once}")])
    assert small_gateway.at_rest().evictions > evictions
    read = wire.ask(tools, system, messages)[2]
    assert read >= total - 3 * BLOCK if marker else read == 0
