"""Tools as text, for chat templates that know none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragcache.errors import InvalidRequest
from ragcache.prompt.tool_format import SMOLLM2
from ragcache.types import Message

_BEFORE = "You can call the functions that are described between <tools> and </tools> in JSON."
_AFTER = """\
To call functions, answer with nothing but a list of calls, in this form:
{example}
When no function helps, answer in plain text."""
_RESULT = "<tool_response>\n{content}\n</tool_response>"

TAGS = "<tools></tools><tool_call></tool_call><tool_response></tool_response>"
"""The adapter's own markup."""

_TOOL_KEYS = frozenset({"type", "function"})
_FUNCTION_KEYS = frozenset({"name", "description", "parameters"})


@dataclass(frozen=True, slots=True)
class ToolAdapter:
    """Rewrites a conversation with tools into one without, in the same bytes every time.

    The definitions come first in the system message, or in the first one of the user where there
    is no system role: in the part of the prompt that changes least. Calls become text, as the model
    wrote them. Results keep their turn where the template has one for them, else they
    are the user's, together with what the user says next.
    """

    has_system: bool
    has_tool_role: bool

    def rewrite(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """The messages for the template; `tools` are rendered into them."""
        turns: list[dict[str, Any]] = []
        is_result = False
        for message in messages:
            turn = self._turn(message)
            if is_result and turn["role"] == "user":
                turns[-1]["content"] += "\n" + turn["content"]
            else:
                turns.append(turn)
            is_result = message["role"] == "tool" and not self.has_tool_role
        if tools:
            self._put_in_front(turns, self.describe(tools))
        return turns

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The definitions, one a line, and how to call them."""
        lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
        example = SMOLLM2.write([("function name", {"parameter name": "value"})])
        return "\n".join([_BEFORE, "<tools>", *lines, "</tools>", _AFTER.format(example=example)])

    def _turn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        turn = dict(message)
        if calls := turn.pop("tool_calls", None):
            functions = (call["function"] for call in calls)
            text = SMOLLM2.write((f["name"], f["arguments"]) for f in functions)
            turn["content"] = "\n".join(filter(None, [turn["content"], text]))
        elif turn["role"] == "tool" and not self.has_tool_role:
            return {"role": "user", "content": _RESULT.format(content=turn["content"])}
        return turn

    def _put_in_front(self, turns: list[dict[str, Any]], text: str) -> None:
        if turns[0]["role"] != "system" and self.has_system:
            turns.insert(0, {"role": "system", "content": text})
        else:
            turns[0]["content"] = "\n\n".join(filter(None, [text, turns[0]["content"]]))


def definition(tool: Mapping[str, Any]) -> dict[str, Any]:
    """What of a tool belongs into a prompt: no cache markers, nor `strict`, which is grammar."""
    kept = {key: value for key, value in tool.items() if key in _TOOL_KEYS}
    if isinstance(function := kept.get("function"), Mapping):
        kept["function"] = {k: v for k, v in function.items() if k in _FUNCTION_KEYS}
    return kept


def check_results(messages: Sequence[Message]) -> None:
    """Raise InvalidRequest for a result without its call, a second one, or a call without any.

    The results have to be there when the assistant is to go on. Those at the start of a
    conversation whose calls have been cut off are accepted.
    """
    waiting: dict[str, int] = {}  # calls, and the message that each is in
    any_calls = False
    for index, message in enumerate(messages):
        if message.role == "assistant":
            _refuse_waiting(waiting)
        ids = [id for call in message.tool_calls if (id := call.get("id")) is not None]
        waiting |= dict.fromkeys(ids, index)
        any_calls = any_calls or bool(ids)
        if message.tool_call_id is None and message.role in ("tool", "function") and waiting:
            del waiting[next(iter(waiting))]  # without ids, the order tells
        if message.tool_call_id is None or not any_calls:
            continue
        if message.tool_call_id not in waiting:
            raise InvalidRequest(
                f"no earlier call waits for a result with the id {message.tool_call_id!r}",
                param=f"messages[{index}].tool_call_id",
            )
        del waiting[message.tool_call_id]
    if messages[-1].role != "assistant":
        _refuse_waiting(waiting)


def _refuse_waiting(calls: Mapping[str, int]) -> None:
    for call_id, index in calls.items():
        raise InvalidRequest(
            f"no result follows for the call {call_id!r}", param=f"messages[{index}].tool_calls"
        )
