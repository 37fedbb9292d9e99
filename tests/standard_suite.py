"""LangChain's standard suite over the gateway: what its subjects have in common."""

from __future__ import annotations

from functools import reduce
from operator import add
from uuid import uuid4

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

# Warnings of the libraries about themselves.
QUIET = [
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


def new_question() -> str:
    """More than a block that no cache has seen."""
    return f"{uuid4()}: what do you make of that, in a few words?"


class Suite(ChatModelIntegrationTests):
    """What all subjects have in common."""

    @pytest.fixture(autouse=True)
    def _answers(self, gateway):
        gateway.script.rules = RULES
        self.url, self.serving = gateway.url, gateway.serving

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


class SmallModel:
    """The embedded model in place of the script; what asks for a better one may fail."""

    @pytest.fixture(autouse=True)
    def _answers(self, embedded, small_model):
        self.url, self.serving = embedded, small_model

    @property
    def chat_model_params(self):
        return {**super().chat_model_params, "max_tokens": 64}

    @property
    def supports_json_mode(self):
        return False  # the keys are asked for in words only

    @pytest.mark.xfail(reason="the arguments must be copied from the question")
    def test_tool_calling(self, model):
        super().test_tool_calling(model)

    @pytest.mark.xfail(reason="the arguments must be copied from the question")
    async def test_tool_calling_async(self, model):
        await super().test_tool_calling_async(model)

    @pytest.mark.xfail(reason="the model must decide for the call by itself")
    def test_agent_loop(self, model):
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason="Chinese and Japanese names must be copied from the question")
    def test_unicode_tool_call_integration(self, model, tool_choice=None, force_tool_call=True):
        super().test_unicode_tool_call_integration(
            model, tool_choice=tool_choice, force_tool_call=force_tool_call
        )
