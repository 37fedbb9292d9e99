"""How much of each prompt of a run came from the cache, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, LLMResult

_HEADER = ("step", "prompt", "reused", "computed", "missed")


@dataclass(frozen=True, slots=True)
class ReportedStep:
    """What the prompt of one call of a model cost, in tokens.

    `reason` says why no more of it was reused, and `segment` the part of the prompt where that
    began; both are None where everything that was computed before was found.
    """

    name: str
    prompt_tokens: int
    reused_tokens: int
    reason: str | None = None
    segment: str | None = None
    thread: str | None = None

    @property
    def computed_tokens(self) -> int:
        """The rest of the prompt."""
        return self.prompt_tokens - self.reused_tokens


class CacheReport(BaseCallbackHandler):
    """Notes what every model call of a run reused; printed, it is a table.

    A step is named by its nodes in the graph, and by its number among parallel branches; outside
    of a graph, by the name of the run. Calls that fail or are left early are not in the report, nor
    are answers that come from LangChain's own cache (`set_llm_cache`), or those of models that tell
    no usage. One report may serve several runs, also at once.

    Example:
        .. code-block:: python

            report = CacheReport()
            graph.invoke(state, {"callbacks": [report]})
            print(report)
    """

    run_inline = True  # on the caller's loop: quicker than the way to a thread and back

    def __init__(self) -> None:
        # Calls end in many threads; adding to a list and to a dict are atomic.
        self._steps: list[ReportedStep] = []
        self._started: dict[UUID, tuple[str, str | None]] = {}

    @property
    def steps(self) -> list[ReportedStep]:
        """The calls so far, in the order in which they ended."""
        return [*self._steps]

    @property
    def prompt_tokens(self) -> int:
        """Of all steps."""
        return sum(step.prompt_tokens for step in self.steps)

    @property
    def reused_tokens(self) -> int:
        """Of all steps."""
        return sum(step.reused_tokens for step in self.steps)

    @property
    def computed_tokens(self) -> int:
        """Of all steps."""
        return sum(step.computed_tokens for step in self.steps)

    def add(
        self,
        name: str,
        usage: UsageMetadata,
        explanation: Mapping[str, Any] | None = None,
        thread: str | None = None,
    ) -> None:
        """Note a call that callbacks do not see, such as `ChatRagcache.warm`.

        `explanation` is the `response_metadata["ragcache"]` of an answer.
        """
        told = explanation or {}
        self._steps.append(
            ReportedStep(
                name,
                usage["input_tokens"],
                usage.get("input_token_details", {}).get("cache_read", 0),
                told.get("reason"),
                told.get("segment") if told.get("reason") else None,
                thread,
            )
        )

    def on_chat_model_start(
        self,
        serialized: dict[str, Any] | None,
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Note which step this is."""
        run = kwargs.get("name") or (serialized or {}).get("name") or "model"
        thread = (metadata or {}).get("thread_id")
        name = _step_name(metadata or {}) or str(run)
        self._started[run_id] = name, None if thread is None else str(thread)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Note what it cost; an answer in several choices has one prompt."""
        name, thread = self._started.pop(run_id, (None, None))
        generation = response.generations[0][0]
        message = generation.message if isinstance(generation, ChatGeneration) else None
        if name is not None and isinstance(message, AIMessage) and (usage := _usage(message)):
            self.add(name, usage, message.response_metadata.get("ragcache"), thread)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget the step."""
        self._started.pop(run_id, None)

    def __str__(self) -> str:
        """The table: one line a step, the totals last."""
        steps = self.steps
        total = ReportedStep("total", self.prompt_tokens, self.reused_tokens)
        share = f"{total.reused_tokens / max(total.prompt_tokens, 1):.1%} reused"
        several = len({step.thread for step in steps}) > 1
        rows = [_HEADER, *(_row(_name(step, several), step, _missed(step)) for step in steps)]
        rows.append(_row(total.name, total, share))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(_line(row, widths) for row in rows)


def _usage(message: AIMessage) -> UsageMetadata | None:
    """What a call of the model cost; None where there was none: LangChain's cache costs nothing."""
    usage = message.usage_metadata
    return None if usage is None or usage.get("total_cost") == 0 else usage


def _step_name(metadata: Mapping[str, Any]) -> str:
    """The nodes on the way to the call, and the number of its branch where there are several."""
    path = str(metadata.get("langgraph_checkpoint_ns") or metadata.get("langgraph_node", ""))
    nodes = "/".join(node.partition(":")[0] for node in path.split("|"))  # behind the colon: an id
    match metadata.get("langgraph_path"):
        case ["__pregel_push", int(branch), *_]:
            return f"{nodes}[{branch}]"
    return nodes


def _name(step: ReportedStep, with_thread: bool) -> str:
    return f"{step.thread} {step.name}" if with_thread and step.thread else step.name


def _missed(step: ReportedStep) -> str:
    return " in ".join(part for part in (step.reason, step.segment) if part)


def _row(name: str, step: ReportedStep, remark: str) -> tuple[str, ...]:
    counts = (step.prompt_tokens, step.reused_tokens, step.computed_tokens)
    return (name, *(f"{count:,}" for count in counts), remark)


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    name, *counts, remark = row
    cells = [count.rjust(width) for count, width in zip(counts, widths[1:-1], strict=True)]
    return "  ".join([name.ljust(widths[0]), *cells, remark]).rstrip()
