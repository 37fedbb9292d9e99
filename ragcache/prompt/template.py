"""Messages to text: the model's own chat template, with the client's strings kept as data."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from transformers import PreTrainedTokenizerBase

# Private, but the only way to hand the template a clock: `apply_chat_template` copies its
# arguments into plain JSON types first. It gives the sandboxed environment that templates are
# written for, and compiles each template once.
from transformers.utils.chat_template_utils import _compile_jinja_template

from ragcache.errors import InvalidRequest
from ragcache.prompt.control import ControlTokens
from ragcache.prompt.tool_format import ToolFormat, adapted_format, native_format
from ragcache.prompt.tools import TAGS, ToolAdapter, check_results, definition
from ragcache.types import ChatPrompt, Message

logger = logging.getLogger(__name__)

_RESERVED_OPTIONS = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now"})
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
_PROBE_CALL = {
    "id": "probe0000",
    "type": "function",
    "function": {"name": "probe", "arguments": {"x": "y"}},
}
_ROLES = {"function": "tool"}  # OpenAI's older name
_USER = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "b"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A ChatPrompt in the shape that templates read: validated, its control tokens marked."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    options: Mapping[str, Any]


class ChatTemplate:
    """The chat template of one tokenizer.

    Where it has no tools, or has them in a form that nothing here can read, they are rendered by
    a ToolAdapter; `tool_format` is the form in which the model will call them. Rendering depends
    on the conversation and, for a template that reads the clock, on the day. Safe to use from
    several threads.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, today: Callable[[], date] = date.today
    ) -> None:
        self._tokenizer = tokenizer
        self._today = today
        self.source = _source(tokenizer.chat_template)
        self._knows_developer = "developer" in self.source
        self._adapter: ToolAdapter | None = None
        native = native_format(self.source, tokenizer) if self._has_tools() else None
        self.tool_format: ToolFormat = native or adapted_format(self.source, tokenizer)
        if native is None:
            self._adapter = self._make_adapter()
        markup = self.source + (TAGS if self._adapter else "")
        self.control = _control_tokens(tokenizer, markup)
        if "strftime_now" in self.source:
            logger.warning(
                "the chat template prints the date: prompts, and with them cache hits, change daily"
            )

    def prepare(self, prompt: ChatPrompt) -> Conversation:
        """Check a prompt and mark the control tokens in its strings.

        Raises InvalidRequest, naming the field, for what this template cannot render faithfully.
        """
        if not self.source:
            raise InvalidRequest(
                "this model has no chat template; use the completions route", param="messages"
            )
        if not prompt.messages:
            raise InvalidRequest("at least one message is needed", param="messages")
        if taken := _RESERVED_OPTIONS & prompt.template_options.keys():
            raise InvalidRequest(
                f"cannot be set as template options: {', '.join(sorted(taken))}",
                param="chat_template_kwargs",
            )
        check_results(prompt.messages)
        try:
            return self._convert(prompt)
        except RecursionError as error:
            raise InvalidRequest("the prompt is nested too deeply", param="messages") from error

    def render(self, conversation: Conversation, *, generation_prompt: bool = True) -> str:
        """Render a conversation, marks included."""
        messages: Sequence[Mapping[str, Any]] = conversation.messages
        tools = conversation.tools
        try:
            if self._adapter:
                messages, tools = self._adapter.rewrite(messages, tools), None
            context = {
                **self._tokenizer.special_tokens_map,
                **conversation.options,
                "messages": list(messages),
                "tools": tools,
                "add_generation_prompt": generation_prompt,
                "strftime_now": self._today_text,
            }
            chat_template = self._tokenizer.get_chat_template(tools=tools)
            return str(_compile_jinja_template(chat_template).render(context))
        # A template is a sandboxed program whose only input is the request: whatever it trips
        # over, with its own raise_exception or a Python error, lies in the messages.
        except Exception as error:
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error

    def _today_text(self, format: str) -> str:
        """The date in a strftime format; times of day read as midnight."""
        return self._today().strftime(format)

    def _has_tools(self) -> bool:
        """Whether the template renders definitions, and calls with and without them."""
        tools = [_PROBE_TOOL]
        with_call = {**_ANSWER, "tool_calls": [_PROBE_CALL]}
        return _shows(self._probe(_USER, tools=tools), self._probe(_USER)) and all(
            _shows(self._probe(_USER, with_call, tools=t), self._probe(_USER, _ANSWER, tools=t))
            for t in (tools, None)
        )

    def _make_adapter(self) -> ToolAdapter:
        system, result = {"role": "system", "content": "b"}, {"role": "tool", "content": "b"}
        as_result, as_answer = (self._probe(_USER, _ANSWER, turn) for turn in (result, _ANSWER))
        return ToolAdapter(
            has_system=_shows(self._probe(system, _USER), self._probe(_USER)),
            has_tool_role=_shows(as_result, as_answer),
        )

    def _probe(self, *messages: dict[str, Any], tools: Any = None) -> str:
        """What a tiny conversation renders to; "" when this template refuses it."""
        try:
            return self.render(Conversation(messages, tools, {}), generation_prompt=False)
        except InvalidRequest:
            return ""

    def _convert(self, prompt: ChatPrompt) -> Conversation:
        messages = [self._message(*item) for item in enumerate(prompt.messages)]
        tools = self._mark([definition(tool) for tool in prompt.tools], "tools") or None
        options = self._mark(prompt.template_options, "chat_template_kwargs")
        return Conversation(messages, tools, options)

    def _message(self, index: int, message: Message) -> dict[str, Any]:
        fields: dict[str, Any] = self._mark(self._fields(index, message), f"messages[{index}]")
        if message.role == "assistant":
            fields["content"] = self.control.mark_output(message.content)
        return fields

    def _fields(self, index: int, message: Message) -> dict[str, Any]:
        role = _ROLES.get(message.role, message.role)
        if role == "developer" and not self._knows_developer:
            role = "system"
        fields: dict[str, Any] = {"role": role, "content": message.content}
        if message.name is not None:
            fields["name"] = message.name
        if message.tool_calls:
            fields["tool_calls"] = [_with_parsed_arguments(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        return fields

    def _mark(self, value: Any, path: str) -> Any:
        if isinstance(value, str):
            return self.control.mark(require_encodable(value, path))
        if isinstance(value, Mapping):
            return {
                self._mark(key, path): self._mark(item, f"{path}.{key}")
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._mark(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return value


def require_encodable(text: str, param: str) -> str:
    """Return `text`; raise InvalidRequest if it holds a lone surrogate, which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} holds a lone surrogate at character {error.start}", param=param
        ) from error
    return text


def _shows(rendered: str, without: str) -> bool:
    """Whether a probe was rendered, and not as if what it tries were not there."""
    return rendered not in ("", without)


def _source(chat_template: str | dict[str, str] | None) -> str:
    if isinstance(chat_template, dict):
        return "\n".join(chat_template.values())
    return chat_template or ""


def _control_tokens(tokenizer: PreTrainedTokenizerBase, source: str) -> ControlTokens:
    """All special tokens, and the other added tokens with which the template marks structure.

    Some models flag their role markers as ordinary added tokens, so the flag alone won't do.
    White space and words among the added tokens are text, wherever they stand.
    """
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    visible = (
        token.content
        for token in added
        if not token.special and len(token.content) > 2 and token.content in source
    )
    return ControlTokens(
        hidden=(token.content for token in added if token.special and token.content),
        visible=(content for content in visible if not content.isspace() | content.isalnum()),
    )


def _with_parsed_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Templates want the arguments as an object; the wire has them as JSON text.

    Text that is no JSON stays as it is: models do write such calls, and clients send the history
    as it was.
    """
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
