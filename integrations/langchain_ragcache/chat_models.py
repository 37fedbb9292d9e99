"""The chat model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable

from langchain_ragcache.answers import PROVIDER, message_chunks, whole_messages
from langchain_ragcache.calls import Calls
from langchain_ragcache.embedded import GivenEngine
from langchain_ragcache.gateways import Gateway, current_place
from langchain_ragcache.options import Options
from langchain_ragcache.structured_output import (
    Method,
    Schema,
    parsed_beside_raw,
    structured_output,
)
from langchain_ragcache.tools import AnyTool, wire_choice, wire_tools

if TYPE_CHECKING:
    from langchain_core.language_models.model_profile import ModelProfile

Json = dict[str, Any]
_OF_THE_PROMPT = {
    "cache_control",
    "cache_salt",
    "chat_template_kwargs",
    "messages",
    "model",
    "prompt_cache_key",
    "prompt_cache_options",
    "tools",
}
System = str | list[str | dict[str, Any]] | SystemMessage


class ChatRagcache(Options):
    """A model behind ragcache, which prefills what prompts have in common once.

    With `base_url`, or the variable `RAGCACHE_BASE_URL`, requests go to `ragcache serve`; without
    (`base_url=None`), the engine runs in this process, loaded at the first call and shared by all
    chat models with the same `model` and `engine_options`. Both give the same answers.

    Answers tell what the cache did: `usage_metadata["input_token_details"]` has `cache_read` and
    `cache_creation`, `response_metadata["ragcache"]` why the prompt hit as far as it did.

    Calls raise the exceptions of `langchain_core.exceptions`: `ContextOverflowError`,
    `ModelRateLimitError` and so on; ValueError or ImportError where the engine cannot be loaded.

    Example:
        .. code-block:: python

            from langchain_ragcache import ChatRagcache

            model = ChatRagcache(base_url="http://127.0.0.1:8000", temperature=0)
            model.invoke("Why do lighthouses flash?").usage_metadata
    """

    def bind_tools(
        self,
        tools: Sequence[AnyTool],
        *,
        tool_choice: Json | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind tools; `tool_choice` is enforced by decoding and never changes the prompt.

        Args:
            tools: Tools, functions, pydantic or TypedDict classes, or their definitions.
            tool_choice: "auto", "none", "any" (or "required", True), or a tool's name.
            strict: Passed on; every schema is enforced anyway.
            parallel_tool_calls: False allows one call at a time.
            response_format: What the answer has to be where it is no call.
            **kwargs: Other fields of the request.
        """
        wire = self._wire_tools(tools, strict)
        fields = {
            "tools": wire,
            "tool_choice": wire_choice(tool_choice, wire),
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return self.bind(**given, **kwargs)

    def with_structured_output(
        self,
        schema: Schema | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        tools: Sequence[AnyTool] = (),
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers that keep to `schema`.

        Args:
            schema: A pydantic or TypedDict class, a JSON schema, or a tool's definition. With
                "json_mode" it may be missing.
            method: "json_schema" and "function_calling" are enforced by decoding; "json_mode" gives
                some JSON object, whose keys only the prompt can ask for.
            include_raw: Return {"raw", "parsed", "parsing_error"} instead of raising for bad JSON.
            strict: Passed on; every schema is enforced anyway.
            tools: Those of the agent's other prompts, so that this one begins like them; they
                cannot be called here.
            **kwargs: Other fields of the request.
        """
        answers, parser = structured_output(self, schema, method, strict, tools, kwargs)
        return parsed_beside_raw(answers, parser) if include_raw else answers | parser

    def load(self) -> Self:
        """Load the engine, or ask the gateway what it serves, now instead of at the first call.

        Afterwards `profile` tells the model's context length.
        """
        calls = self._calls()
        return self._profiled(calls.loop.wait(calls.served()))

    async def aload(self) -> Self:
        """See `load`."""
        calls = self._calls()
        return self._profiled(await calls.loop.result(calls.served()))

    def warm(self, system: System, tools: Sequence[AnyTool] = (), **kwargs: Any) -> UsageMetadata:
        """Prefill what every prompt of an agent begins with, while something else goes on.

        Nothing is generated. Returns the usage, as that of an answer.

        Args:
            system: The system message, or its content.
            tools: The agent's tools.
            **kwargs: Other fields of the request, such as `prompt_cache_key`.
        """
        calls, body = self._warming(system, tools, kwargs)
        return _usage(calls.loop.wait(calls.complete(body)))

    async def awarm(
        self, system: System, tools: Sequence[AnyTool] = (), **kwargs: Any
    ) -> UsageMetadata:
        """See `warm`."""
        calls, body = self._warming(system, tools, kwargs)
        return _usage(await calls.loop.result(calls.complete(body)))

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[AnyTool] | None = None
    ) -> int:
        """The prompt tokens of `messages`, exactly as the model would get them."""
        calls, body = self._prepared(messages, None, {"tools": self._wire_tools(tools or ())})
        return calls.loop.wait(calls.count_tokens(body))

    def get_num_tokens(self, text: str) -> int:
        """The tokens of `text` within a message."""
        empty, filled = (self.get_num_tokens_from_messages([HumanMessage(t)]) for t in ("", text))
        return filled - empty

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        calls, body = self._prepared(messages, stop, kwargs)
        return _result(calls.loop.wait(calls.complete(body)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        calls, body = self._prepared(messages, stop, kwargs)
        return _result(await calls.loop.result(calls.complete(body)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        calls, body = self._streamed(messages, stop, kwargs)
        for part in calls.loop.iterate(calls.stream(body)):
            for message in message_chunks(part):
                chunk = ChatGenerationChunk(message=message)
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        calls, body = self._streamed(messages, stop, kwargs)
        async with aclosing(calls.loop.aiterate(calls.stream(body))) as parts:
            async for part in parts:
                for message in message_chunks(part):
                    chunk = ChatGenerationChunk(message=message)
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _streamed(
        self, messages: list[BaseMessage], stop: list[str] | None, call: Mapping[str, Any]
    ) -> tuple[Calls, Json]:
        calls, body = self._prepared(messages, stop, call)
        if body.get("n", 1) != 1:
            raise ValueError("n: only one answer can be streamed")  # chunks are merged into one
        return calls, {**body, "stream_options": {"include_usage": True}}

    def _prepared(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, call: Mapping[str, Any]
    ) -> tuple[Calls, Json]:
        """Where a call goes, and its body."""
        model, fields = self._for_call(call)
        if not model.base_url and fields.get("model") == model.model:
            fields.pop("model", None)  # where the weights are is no name that is served
        return model._calls(), model._body(messages, stop, fields)

    def _warming(
        self, system: System, tools: Sequence[AnyTool], call: Mapping[str, Any]
    ) -> tuple[Calls, Json]:
        # Templates want a question behind the system message; what it is does not matter.
        first = system if isinstance(system, SystemMessage) else SystemMessage(system)
        fields = {**call, "tools": self._wire_tools(tools)}
        calls, body = self._prepared([first, HumanMessage("")], [], fields)
        prefill = {name: value for name, value in body.items() if name in _OF_THE_PROMPT}
        return calls, {**prefill, "max_tokens": 0}

    def _calls(self) -> Calls:
        place = current_place()
        gateway: Gateway
        if self.base_url:
            gateway = place.http(self.base_url, self._headers())
        elif self.engine is not None:
            gateway = GivenEngine(self.engine)
        else:
            gateway = place.embedded(self.model, self.engine_options)
        name = self.model if self.base_url else None
        return Calls(place.loop, gateway, name, self.timeout, self.max_retries)

    def _profiled(self, served: Json) -> Self:
        if limit := served.get("max_input_tokens"):
            known: ModelProfile = {"max_input_tokens": limit}
            self.profile = {**known, **(self.profile or {})}
        return self

    def _wire_tools(self, tools: Sequence[AnyTool], strict: bool | None = None) -> list[Json]:
        return wire_tools(tools, strict=strict, stable_order=self.stable_tool_order)

    @property
    def _llm_type(self) -> str:
        return "ragcache-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params.setdefault("ls_model_name", "default")
        if stops := stop or self.stop:
            params["ls_stop"] = stops
        return params

    def _resolve_model_profile(self) -> ModelProfile:
        return {
            "text_inputs": True,
            "text_outputs": True,
            "image_inputs": False,
            "audio_inputs": False,
            "video_inputs": False,
            "tool_calling": True,
            "tool_choice": True,
            "structured_output": True,
            "temperature": True,
        }


def _result(body: Json) -> ChatResult:
    generations = [ChatGeneration(message=message) for message in whole_messages(body)]
    return ChatResult(generations=generations)


def _usage(body: Json) -> UsageMetadata:
    usage = whole_messages(body)[0].usage_metadata
    assert usage is not None  # every body has it
    return usage
