"""Which tokens an output may consist of, so that it keeps to the rules of its request."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

from ragcache.errors import InvalidRequest
from ragcache.prompt.compiled_grammar import CompiledGrammar
from ragcache.prompt.grammar_probe import GrammarProbe
from ragcache.prompt.json_schema import bounded, closed
from ragcache.prompt.lark import JsonRule, LarkWriter, OutputForm
from ragcache.prompt.tool_format import CallSyntax
from ragcache.types import OutputRules

log = logging.getLogger(__name__)

MAX_SCHEMA_SIZE = 256 * 1024  # characters of all schemas together

# What a schema may cost: a second to compile, tens of milliseconds a token in the worst cases.
_LIMITS = LLParserLimits(
    max_grammar_size=50_000,
    max_items_in_row=10_000,
    verbose_errors=False,  # else the output is part of the message
)
_NO_CALLS = CallSyntax("", "", "")
_NO_PARAMETERS = {"type": "object", "properties": {}}


class GrammarCompiler:
    """Compiles output rules for one tokenizer, and remembers the last ones used, also refused ones.

    `find` is quick enough for an event loop, `compile` is not. Safe to use from several threads;
    compiling does not hold the interpreter.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        syntax: CallSyntax | None,
        max_string_length: int | None = None,
        max_entries: int = 128,
    ) -> None:
        """`vocab_size` is the width of the model's logits; `syntax` None: no known form of calls.

        `max_string_length`, in characters, bounds JSON strings whose schema does not.

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
            self._probe = GrammarProbe(self._tokenizer)
        self._max_string_length = max_string_length
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes, CompiledGrammar | InvalidRequest | None] = OrderedDict()
        self._lock = Lock()

    def find(
        self, tools: Sequence[Mapping[str, Any]], rules: OutputRules
    ) -> CompiledGrammar | None:
        """What `compile` returned, or raised, for equal arguments.

        Raises:
            LookupError: when they are not known, or have to be compiled anew.
            InvalidRequest: like `compile`; also for a grammar of which no state came to its end
                before one could be followed no further: the client may have tried that again.
        """
        entry = self._recall(_key(tools, rules))
        if isinstance(entry, InvalidRequest):
            raise InvalidRequest(entry.message, param=entry.param)
        if entry is not None and entry.failure is not None:
            if entry.followed:
                raise LookupError
            param = "tools" if _text_schema(rules) is None else "response_format"
            raise InvalidRequest(f"{param}: cannot be followed: {entry.failure}", param=param)
        return entry

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
        try:
            return self.find(tools, rules)
        except LookupError:
            pass
        key = _key(tools, rules)
        try:
            form = self._form(tools, rules)
            grammar = None if form is None else self._compile(form)
        except InvalidRequest as refusal:
            self._remember(key, InvalidRequest(refusal.message, param=refusal.param))
            raise
        self._remember(key, grammar)
        return grammar

    def _recall(self, key: bytes) -> CompiledGrammar | InvalidRequest | None:
        with self._lock:
            self._entries.move_to_end(key)
            return self._entries[key]

    def _remember(self, key: bytes, entry: CompiledGrammar | InvalidRequest | None) -> None:
        with self._lock:
            self._entries[key] = entry
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def _form(self, tools: Sequence[Mapping[str, Any]], rules: OutputRules) -> OutputForm | None:
        functions = list(_functions(tools, rules))
        schema = _text_schema(rules)
        if rules.tool_choice == "required" and not functions:
            raise InvalidRequest("tool_choice: there is no tool to call", param="tool_choice")
        has_calls = self._syntax is not None and not self._unreadable
        if not has_calls:
            self._check_promises(tools, rules, len(functions))
        if schema is None and not (tools and has_calls):
            return None
        return OutputForm(
            functions=dict(map(self._call_rule, functions)),
            several_calls=rules.parallel_tool_calls,
            json=None if schema is None else self._text_rule(schema),
            free=schema is None and rules.tool_choice != "required",
        )

    def _call_rule(self, numbered: tuple[int, Mapping[str, Any]]) -> tuple[str, JsonRule]:
        number, function = numbered
        param = f"tools[{number}].function.parameters"
        schema = self._enforced(function.get("parameters") or _NO_PARAMETERS, param)
        return function["name"], JsonRule({"type": "object", **schema}, param, lenient=True)

    def _text_rule(self, schema: Mapping[str, Any] | bool) -> JsonRule:
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        return JsonRule(self._enforced(schema, "response_format"), "response_format")

    def _enforced(self, schema: Mapping[str, Any], param: str) -> Mapping[str, Any]:
        limit = self._max_string_length
        enforced: Mapping[str, Any] = closed(schema, param=param)
        return enforced if limit is None else bounded(enforced, limit)

    def _check_promises(
        self, tools: Sequence[Mapping[str, Any]], rules: OutputRules, num_functions: int
    ) -> None:
        """Refuse what takes a grammar of calls."""
        is_narrow = rules.tool_choice != "none" and num_functions < len(tools)
        if rules.tool_choice == "required" or is_narrow:
            param = "tool_choice"
        elif rules.schema is not None and (self._unreadable or num_functions):
            param = "response_format"
        else:
            return
        raise InvalidRequest(f"{param}: cannot be enforced with this model", param=param)

    def _compile(self, form: OutputForm) -> CompiledGrammar:
        _check_size(form)
        try:
            matcher = self._matcher(self._writer.write(form))
        except ValueError as error:
            raise self._refusal(form, str(error)) from error
        self._follow_calls(form, matcher)
        return CompiledGrammar(matcher)

    def _follow_calls(self, form: OutputForm, matcher: LLMatcher) -> None:
        syntax = self._syntax or _NO_CALLS
        for name, rule in form.functions.items():
            try:
                self._probe.follow(matcher.deep_copy(), syntax.opening(name))
            except ValueError as error:
                raise InvalidRequest(f"{rule.param}: {error}", param=rule.param) from error

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
        self._probe.follow(matcher.deep_copy())
        return matcher


def _key(tools: Sequence[Mapping[str, Any]], rules: OutputRules) -> bytes:
    """What equal requests have in common."""
    functions = [(tool["function"]["name"], tool["function"].get("parameters")) for tool in tools]
    choice = (rules.tool_choice, rules.allowed_tools, rules.parallel_tool_calls)
    return _digest(functions, "tools") + _digest((choice, rules.schema), "response_format")


def _digest(value: Any, param: str) -> bytes:
    try:
        return hashlib.sha256(json.dumps(value).encode()).digest()
    except RecursionError as error:
        raise InvalidRequest(f"{param}: nested too deep", param=param) from error


def _check_size(form: OutputForm) -> None:
    total = 0
    for rule in form.rules:
        total += len(rule.text)
        if total > MAX_SCHEMA_SIZE:
            limit = f"{MAX_SCHEMA_SIZE // 1024} KiB"
            raise InvalidRequest(f"{rule.param}: over {limit} of schemas", param=rule.param)


def _text_schema(rules: OutputRules) -> Mapping[str, Any] | bool | None:
    """The schema for text, unless there can be no text."""
    return None if rules.tool_choice == "required" else rules.schema


def _functions(
    tools: Sequence[Mapping[str, Any]], rules: OutputRules
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The functions that may be called, with their numbers."""
    for number, function in enumerate(tool["function"] for tool in tools):
        allowed = rules.allowed_tools is None or function["name"] in rules.allowed_tools
        if allowed and rules.tool_choice != "none":
            yield number, function


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
