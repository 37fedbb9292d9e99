"""LangChain's standard suites, through ChatRagcache: over HTTP, and with the engine in here."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_ragcache import ChatRagcache
from langchain_tests.unit_tests import ChatModelUnitTests
from standard_suite import QUIET, SmallModel, Suite, new_question

from ragcache.embedded import EmbeddedGateway

pytestmark = QUIET


class Unit(ChatModelUnitTests):
    """What needs no model."""

    @property
    def chat_model_class(self):
        return ChatRagcache

    @property
    def has_tool_choice(self):
        return True

    @property
    def supports_json_mode(self):
        return True

    @property
    def model_override_value(self):
        return "alias"


class TestUnitOverHttp(Unit):
    """With the URL of a gateway."""

    @property
    def chat_model_params(self):
        return {"model": "tiny", "base_url": "http://127.0.0.1:8000"}

    @property
    def init_from_env_params(self):
        env = {"RAGCACHE_BASE_URL": "http://127.0.0.1:9000", "RAGCACHE_API_KEY": "secret"}
        expected = {"base_url": "http://127.0.0.1:9000", "api_key": "secret"}
        return env, {"model": "tiny"}, expected


class TestUnitEmbedded(Unit):
    """With an engine that nothing here loads."""

    @property
    def chat_model_params(self):
        return {"base_url": None, "engine_options": {"kv_cache_memory": "1GiB"}}


class ChatRagcacheSuite(Suite):
    """What needs a model."""

    gateway: dict[str, Any]  # where it is

    @property
    def chat_model_class(self):
        return ChatRagcache

    @property
    def chat_model_params(self):
        return {**self.gateway, "temperature": 0, "max_tokens": 100, "max_retries": 0}

    @property
    def supports_json_mode(self):
        return True

    def invoke_with_cache_creation_input(self, *, stream=False):
        message = self._twice(stream, new_question())
        assert message.usage_metadata["input_token_details"]["cache_creation"] > 0
        return message


class OverHttp(ChatRagcacheSuite):
    """Through a socket."""

    @pytest.fixture(autouse=True)
    def _place(self, _answers):
        self.gateway = {"base_url": self.url}


class Embedded(ChatRagcacheSuite):
    """In this process."""

    @pytest.fixture(autouse=True)
    def _place(self, request, _answers):
        self.gateway = {"base_url": None, "engine": EmbeddedGateway(self.serving)}


class TestOverHttp(OverHttp):
    """The scripted model."""


class TestEmbedded(Embedded):
    """The scripted model."""


class TestSmallModelOverHttp(SmallModel, OverHttp):
    """The embedded model."""


class TestSmallModelEmbedded(SmallModel, Embedded):
    """The embedded model."""
