"""Prompt caching for agents of `langchain.agents.create_agent`. Needs the package `langchain`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import Any, Literal, get_args
from warnings import warn

from langchain_core.runnables import RunnableBinding, RunnableConfig, ensure_config
from langchain_core.tools import BaseTool

from langchain_ragcache.chat_models import ChatRagcache
from langchain_ragcache.markers import marked_system, marked_tools
from langchain_ragcache.prompt_changes import PromptChangedWarning, PromptChanges
from langchain_ragcache.tools import name_of, wire_tools

try:
    from langchain.agents.middleware.types import (
        AgentMiddleware,
        ModelCallResult,
        ModelRequest,
        ModelResponse,
    )
    from langchain.agents.structured_output import OutputToolBinding, ToolStrategy
except ImportError as error:
    raise ImportError(
        "RagcachePromptCachingMiddleware is for agents of langchain, which is not installed: "
        "pip install langchain"
    ) from error

try:
    from langchain.agents.middleware.types import TracePolicy, omit_payload
except ImportError:  # older than trace policies
    _TRACE_POLICY = None
else:
    _TRACE_POLICY = TracePolicy(process_inputs=omit_payload)

Ttl = Literal["5m", "30m", "1h", "12h"]
_LONGEST_KEY = 1024  # characters of a `prompt_cache_key` that the gateway takes


class RagcachePromptCachingMiddleware(AgentMiddleware):
    """Keeps the front of an agent's prompts the same, asks to retain it, and tells when it changes.

    It belongs at the end of the agent's `middleware`: what stands behind it, such as
    `dynamic_prompt`, makes its changes afterwards, and those it neither marks nor tells of.

    In every call of a `ChatRagcache` model

    - the tools are sorted by name, whatever order they were given in,
    - the last block of the system message and the last tool get a cache marker,
    - `prompt_cache_key` is the thread of the run (the hash of a long id), unless the user has set
      one,
    - a `PromptChangedWarning` says what differs from the last turn of the thread in system
      message or tools, once for each kind of change (`lint`).

    Nothing is changed in place. Markers that are there already stay. Runs without a `thread_id`
    have no last turn to compare with. Agents that share an instance and a thread are told apart by
    their names and nodes.
    """

    trace_policy = _TRACE_POLICY  # the model's own span has the conversation already

    def __init__(
        self,
        *,
        ttl: Ttl = "5m",
        min_messages_to_cache: int = 0,
        unsupported_model_behavior: Literal["ignore", "warn", "raise"] = "warn",
        prompt_cache_key: str | None = None,
        lint: bool = True,
    ) -> None:
        """Markers ask for `ttl`, from `min_messages_to_cache` messages on (system included).

        `unsupported_model_behavior` says what to do about models that are no `ChatRagcache`: call
        them as if this middleware were not there, the same with a warning, or raise `ValueError`.

        Raises:
            ValueError: `ttl` is not a lifetime that the gateway knows.
        """
        super().__init__()
        if ttl not in get_args(Ttl):
            raise ValueError(f"ttl must be one of {', '.join(get_args(Ttl))}, not {ttl!r}")
        self.ttl = ttl
        self.min_messages_to_cache = min_messages_to_cache
        self.unsupported_model_behavior = unsupported_model_behavior
        self.prompt_cache_key = prompt_cache_key
        self._changes = PromptChanges() if lint else None

    def wrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]
    ) -> ModelCallResult:
        """Call the model with the prepared request."""
        return handler(self._prepared(request))

    async def awrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
    ) -> ModelCallResult:
        """Call the model with the prepared request."""
        return await handler(self._prepared(request))

    def _prepared(self, request: ModelRequest) -> ModelRequest:
        model, bound = _unbound(request.model)
        if not isinstance(model, ChatRagcache):
            self._refuse(model)
            return request
        config = ensure_config()
        request = request.override(
            tools=sorted(request.tools, key=_tool_name),
            model_settings=self._settings(request, model, bound, _thread(config)),
        )
        self._report_changes(request, config)
        return self._marked(request)

    def _refuse(self, model: Any) -> None:
        message = f"{self.name} is for ChatRagcache models, not for {type(model).__name__}"
        if self.unsupported_model_behavior == "raise":
            raise ValueError(message)
        if self.unsupported_model_behavior == "warn":
            _warn(message, UserWarning)

    def _settings(
        self, request: ModelRequest, model: ChatRagcache, bound: Mapping[str, Any], thread: Any
    ) -> dict[str, Any]:
        """The settings with a `prompt_cache_key`: the user's own, else ours, else the thread."""
        # Tools bound to a binding replace what was bound before, so that a key there is repeated.
        fields = {"prompt_cache_key": model.prompt_cache_key, **model.extra_body, **bound}
        own = {**fields, **request.model_settings}["prompt_cache_key"]
        key = own or self.prompt_cache_key or _session_key(thread)
        return request.model_settings | ({} if key is None else {"prompt_cache_key": str(key)})

    def _report_changes(self, request: ModelRequest, config: RunnableConfig) -> None:
        """Warn of what differs from the thread's last turn and was not told yet."""
        thread = _thread(config)
        if self._changes is None or thread is None:
            return
        system = request.system_message.text if request.system_message else ""
        tools = wire_tools(_sent_tools(request), strict=None, stable_order=False)
        for change in self._changes.observe((thread, *_agent(config)), str(system), tools):
            _warn(
                f"the prompt of thread {thread!r} is not that of its last turn, and is computed "
                f"anew from where it differs: {change}",
                PromptChangedWarning,
            )

    def _marked(self, request: ModelRequest) -> ModelRequest:
        """The request with its markers, where it is long enough."""
        system = request.system_message
        if len(request.messages) + (system is not None) < self.min_messages_to_cache:
            return request
        marker = {"type": "ephemeral", "ttl": self.ttl}
        return request.override(
            system_message=marked_system(system, marker) if system else None,
            tools=marked_tools(request.tools, marker),
        )


def _warn(message: str, category: type[Warning]) -> None:
    # As from this module, by which it can be filtered: the user's code is not on the stack of an
    # asynchronous run, and in others behind any number of LangGraph's frames.
    warn(message, category, stacklevel=2)


def _unbound(model: Any) -> tuple[Any, Mapping[str, Any]]:
    """The model inside of `model.bind(...)`, and what was bound."""
    bound: dict[str, Any] = {}
    while isinstance(model, RunnableBinding):
        bound = {**model.kwargs, **bound}
        model = model.bound
    return model, bound


def _tool_name(tool: BaseTool | dict[str, Any]) -> str:
    if isinstance(tool, BaseTool):
        return tool.name
    return name_of(*wire_tools([tool], strict=None, stable_order=False))


def _sent_tools(request: ModelRequest) -> list[BaseTool | dict[str, Any]]:
    """The tools of the prompt: those of the agent, then those that stand for an answer's schema."""
    answers = request.response_format
    specs = answers.schema_specs if isinstance(answers, ToolStrategy) else []
    return [*request.tools, *(OutputToolBinding.from_schema_spec(spec).tool for spec in specs)]


def _thread(config: RunnableConfig) -> Any:
    return config.get("configurable", {}).get("thread_id")


def _session_key(thread: Any) -> str | None:
    """The id of a thread, or its hash where that is too long for a key."""
    if thread is None:
        return None
    key = str(thread)
    digest = sha256(key.encode("utf-8", "surrogatepass"))
    return key if len(key) <= _LONGEST_KEY else digest.hexdigest()


def _agent(config: RunnableConfig) -> tuple[Any, ...]:
    """Which of the agents in a thread this is: the nodes on the way to it, and its name.

    Agents that are called by tools are all in the same node.
    """
    path = str(config.get("configurable", {}).get("checkpoint_ns", ""))
    nodes = (node.partition(":")[0] for node in path.split("|"))  # behind the colon: a new id
    return *nodes, config.get("metadata", {}).get("lc_agent_name")
