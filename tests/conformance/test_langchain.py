"""LangChain's standard suites, through its own OpenAI and Anthropic clients."""

from __future__ import annotations

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.unit_tests import ChatModelUnitTests
from standard_suite import QUIET, SmallModel, Suite, new_question

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:Unrecognized structured output method")]


@pytest.fixture(autouse=True)
def _keys(monkeypatch):
    """Some of the suite makes clients without any arguments."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "none")


class TestUnitChatOpenAI(ChatModelUnitTests):
    """The client by itself, as users point it at the gateway."""

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {"model": "tiny", "base_url": "http://127.0.0.1:8000/v1"}


class TestUnitChatAnthropic(ChatModelUnitTests):
    """The same."""

    @property
    def chat_model_class(self):
        return ChatAnthropic

    @property
    def chat_model_params(self):
        return {"model": "tiny", "base_url": "http://127.0.0.1:8000"}


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
            "max_tokens": 100,
            "stream_usage": True,
            "max_retries": 0,
        }

    @property
    def supports_json_mode(self):
        return True

    def invoke_with_cache_creation_input(self, *, stream=False):
        message = self._twice(stream, new_question())
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
            "max_tokens": 100,
            "max_retries": 0,
        }

    def invoke_with_cache_creation_input(self, *, stream=False):
        marked = {"type": "text", "text": new_question(), "cache_control": {"type": "ephemeral"}}
        message = self._twice(stream, [marked])
        details = message.usage_metadata["input_token_details"]
        assert details["cache_creation"] + details.get("ephemeral_5m_input_tokens", 0) > 0
        return message


class TestSmallModelChatOpenAI(SmallModel, TestChatOpenAI):
    """The OpenAI-compatible route over the embedded model."""


class TestSmallModelChatAnthropic(SmallModel, TestChatAnthropic):
    """The Anthropic-compatible route over the embedded model."""
