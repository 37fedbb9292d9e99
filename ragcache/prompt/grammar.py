"""Which tokens an output may consist of, so that it keeps to the rules of its request."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from ragcache.errors import GenerationFailed, InvalidRequest
from ragcache.prompt.json_schema import closed
from ragcache.prompt.lark import JsonRule, LarkWriter, OutputForm
from ragcache.prompt.tool_format import CallSyntax
from ragcache.types import OutputRules

log = logging.getLogger(__name__)

# What a schema may cost: seconds to compile, tens of milliseconds a token in the worst cases.
_LIMITS = LLParserLimits(
    max_grammar_size=50_000,
    max_items_in_row=10_000,
    verbose_errors=False,  # else the output is part of the message
)
_NO_CALLS = CallSyntax("", "", "")
_NO_PARAMETERS = {"type": "object", "properties": {}}


class GrammarConstraint:
    """The state of one choice in its grammar; the engine's `Constraint`."""

    def __init__(self, matcher: LLMatcher, on_failure: Callable[[], None]) -> None:
        self._matcher = matcher
        self._on_failure = on_failure

    def fill_mask(self, bits: NDArray[np.int32]) -> None:
        """Set the bits of the allowed tokens in `bits` `[ceil(V / 32)]`, clear all others."""
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def advance(self, token_id: int) -> None:
        """Go on behind an allowed token, which may be an end token.

        Raises:
            GenerationFailed: when the grammar has become too complex to be followed any
                further, or does not allow the token.
        """
        if not self._matcher.consume_token(token_id):
            self._on_failure()
            reason = _reason(self._matcher)
            raise GenerationFailed(f"the grammar of the output cannot be followed: {reason}")

    def forced(self) -> list[int]:
        """Tokens that must come next, maybe none; goes on behind them."""
        tokens = self._matcher.compute_ff_tokens()
        return tokens[: self._matcher.try_consume_tokens(tokens)]

    @property
    def finished(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class CompiledGrammar:
    """What the outputs of equal requests may be; the engine's `Grammar`.

    All its states share one automaton, which grows as they need it, up to a limit: once a state has
    failed, the grammar is `spent`. It goes on, but must be compiled again for new requests.
    """

    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype
        self.spent = False

    def constraint(self) -> GrammarConstraint:
        """A new state, at the start; costs microseconds."""
        return GrammarConstraint(self._prototype.deep_copy(), self._spend)

    def _spend(self) -> None:
        self.spent = True


class GrammarCompiler:
    """Compiles output rules for one tokenizer, and remembers the last ones used.

    Safe to use from several threads; compiling does not hold the interpreter.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        syntax: CallSyntax | None,
        max_entries: int = 128,
    ) -> None:
        """`vocab_size` is the width of the model's logits; `syntax` None: no known form of calls.

        With a tokenizer that the library cannot read, nothing can be enforced.
        """
        # The library cannot do without an end token of its tokenizer.
        ends = [id for id in eos_token_ids if id < len(tokenizer)] or [len(tokenizer) - 1]
        self._syntax = syntax
        self._unreadable = False
        try:
            self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)
        except ValueError as error:
            log.warning("no tool choice or JSON schema can be enforced with this model: %s", error)
            self._unreadable = True
        else:
            self._writer = _writer(tokenizer, self._tokenizer, ends, syntax)
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes | None, CompiledGrammar] = OrderedDict()
        self._lock = Lock()

    def compile(
        self, tools: Sequence[Mapping[str, Any]], rules: OutputRules
    ) -> CompiledGrammar | None:
        """The grammar of outputs that keep to `rules`; None when any output does.

        `tools` have OpenAI's form. JSON has the separators ", " and ": " and no escapes but the
        short ones, like `json.dumps(value, ensure_ascii=False)` and like `tojson` in chat
        templates: what was generated reads the same when it comes back in the history. Objects
        that list their properties have no others (see `json_schema.closed`). Schemas of tools
        are advice: what of them no grammar can express is ignored.

        Raises:
            InvalidRequest: for a schema that is invalid, too complex, or of a kind that cannot be
                enforced, and for rules that cannot be combined; `param` is the field.
        """
        key = _key(tools, rules)
        with self._lock:
            if (known := self._entries.get(key)) is not None and not known.spent:
                self._entries.move_to_end(key)
                return known
        form = self._form(tools, rules)
        if form is None:
            return None
        grammar = self._compile(form)
        with self._lock:
            self._entries[key] = grammar
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        return grammar

    def _form(self, tools: Sequence[Mapping[str, Any]], rules: OutputRules) -> OutputForm | None:
        required = rules.tool_choice == "required"
        functions = list(_functions(tools, rules))
        schema = None if required else rules.schema
        if required and not functions:
            raise InvalidRequest("tool_choice: there is no tool to call", param="tool_choice")
        if self._unreadable or (functions and self._syntax is None):
            if required or schema is not None:
                param = "tool_choice" if required else "response_format"
                raise InvalidRequest(f"{param}: cannot be enforced with this model", param=param)
            return None
        if schema is None and not (tools and self._syntax):
            return None
        return OutputForm(
            functions=dict(map(_call_rule, functions)),
            several_calls=rules.parallel_tool_calls,
            json=None if schema is None else _text_rule(schema),
            free=schema is None and not required,
        )

    def _compile(self, form: OutputForm) -> CompiledGrammar:
        try:
            return CompiledGrammar(self._matcher(self._writer.write(form)))
        except ValueError as error:
            raise self._refusal(form, str(error)) from error

    def _refusal(self, form: OutputForm, reason: str) -> InvalidRequest:
        """Find the schema that is to blame."""
        for rule in form.rules:
            try:
                self._matcher(LLMatcher.grammar_from_json_schema(rule.text))
            except ValueError as error:
                return InvalidRequest(f"{rule.param}: {error}", param=rule.param)
        return InvalidRequest(f"tools: too complex together: {reason}", param="tools")

    def _matcher(self, grammar: str) -> LLMatcher:
        """Compile; raises ValueError with the library's message."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        probe = matcher.deep_copy()
        probe.compute_bitmask()  # only this shows that a grammar allows nothing at all
        if probe.is_error():
            raise ValueError(_reason(probe))
        return matcher


def _key(tools: Sequence[Mapping[str, Any]], rules: OutputRules) -> bytes | None:
    """What equal requests have in common; None: nested too deep to be valid."""
    functions = [tool["function"] for tool in tools]
    choice = (rules.tool_choice, rules.allowed_tools, rules.parallel_tool_calls)
    try:
        text = json.dumps((functions, choice, rules.schema))
    except RecursionError:
        return None
    return hashlib.sha256(text.encode()).digest()


def _functions(
    tools: Sequence[Mapping[str, Any]], rules: OutputRules
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The functions that may be called, with their numbers."""
    for number, function in enumerate(tool["function"] for tool in tools):
        allowed = rules.allowed_tools is None or function["name"] in rules.allowed_tools
        if allowed and rules.tool_choice != "none":
            yield number, function


def _call_rule(numbered: tuple[int, Mapping[str, Any]]) -> tuple[str, JsonRule]:
    number, function = numbered
    param = f"tools[{number}].function.parameters"
    schema = closed(function.get("parameters") or _NO_PARAMETERS, param=param)
    return function["name"], JsonRule({"type": "object", **schema}, param, lenient=True)


def _text_rule(schema: Mapping[str, Any] | bool) -> JsonRule:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return JsonRule(closed(schema, param="response_format"), "response_format")


def _writer(
    tokenizer: PreTrainedTokenizerFast,
    vocabulary: LLTokenizer,
    eos_token_ids: Collection[int],
    syntax: CallSyntax | None,
) -> LarkWriter:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    marks = {
        token.content: id
        for id, token in added.items()
        if id < vocabulary.vocab_size and vocabulary.is_special_token(id)
    }
    visible = [
        text for text, id in marks.items() if not added[id].special and id not in eos_token_ids
    ]
    return LarkWriter(syntax or _NO_CALLS, marks, visible)


def _reason(matcher: LLMatcher) -> str:
    """The library's message, without a stack or the state of the parser."""
    message = matcher.get_error().split("\n<", 1)[0]
    if message.startswith("NoExtension"):
        return "there is nothing that it allows"
    return "too large" if message.startswith("panic") else message
