"""LangChain's standard suite, through its own OpenAI and Anthropic clients."""

from __future__ import annotations

from functools import reduce
from operator import add

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

# Warnings of the libraries about themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    pytest.mark.filterwarnings("ignore:Received a Pydantic BaseModel V1:UserWarning"),
]

CALL = '<tool_call>[{"name": "%s", "arguments": %s}]</tool_call>'
CUSTOMER = '{"customer_name": "%s", "description": "company"}'
RULES = [
    ("magic_function_no_args.*Use the tool", CALL % ("magic_function_no_args", "{}")),
    (r"magic_function\(3\)", CALL % ("magic_function", '{"input": 3}')),
    ("weather in San Francisco", CALL % ("get_weather", '{"location": "San Francisco, CA"}')),
    ("as a JSON with", '{"setup": "Why?", "punchline": "Because."}'),
    ("greeting_generator", CALL % ("greeting_generator", '{"answer_style": "Pirate"}')),
    ("你好啊集团", CALL % ("unicode_customer", CUSTOMER % "你好啊集团")),
    ("こんにちは株式会社", CALL % ("unicode_customer", CUSTOMER % "こんにちは株式会社")),
]
LONG = "You answer from the passages given. " * 40


class Suite(ChatModelIntegrationTests):
    """What both clients have in common."""

    @pytest.fixture(autouse=True)
    def _answers(self, gateway):
        gateway.script.rules = RULES
        self.url = gateway.url

    @property
    def has_tool_choice(self):
        return True

    @property
    def model_override_value(self):
        return "alias"

    @property
    def supports_anthropic_inputs(self):
        return True

    @property
    def supported_usage_metadata_details(self):
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def _twice(self, stream: bool, content: object) -> AIMessage:
        """The answer to a prompt that another one has been in front of."""
        model = self.chat_model_class(**self.chat_model_params)
        model.invoke([SystemMessage(LONG), HumanMessage("hello")])
        messages = [SystemMessage(LONG), HumanMessage(content)]
        if not stream:
            return model.invoke(messages)
        return reduce(add, model.stream(messages))

    def invoke_with_cache_read_input(self, *, stream=False):
        message = self._twice(stream, "and now?")
        assert message.usage_metadata["input_token_details"]["cache_read"] > 200
        return message


class TestChatOpenAI(Suite):
    """The OpenAI-compatible route."""

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {
            "model": "tiny",
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 150,
            "stream_usage": True,
            "max_retries": 0,
        }

    @property
    def supports_json_mode(self):
        return True

    def invoke_with_cache_creation_input(self, *, stream=False):
        message = self._twice(stream, "a question that is long enough to fill a block " * 3)
        assert message.usage_metadata["input_token_details"]["cache_creation"] > 0
        return message


class TestChatAnthropic(Suite):
    """The Anthropic-compatible route."""

    @property
    def chat_model_class(self):
        return ChatAnthropic

    @property
    def chat_model_params(self):
        return {
            "model": "tiny",
            "base_url": self.url,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 150,
            "max_retries": 0,
        }

    def invoke_with_cache_creation_input(self, *, stream=False):
        text = "a question that is long enough to fill a block " * 3
        marked = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        message = self._twice(stream, [marked])
        details = message.usage_metadata["input_token_details"]
        assert details["cache_creation"] + details.get("ephemeral_5m_input_tokens", 0) > 0
        return message
