"""Outputs that keep to the rules of a request, token by token."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from ragcache.errors import GenerationFailed, InvalidRequest
from ragcache.prompt import grammar as grammar_module
from ragcache.prompt.grammar import GrammarCompiler
from ragcache.prompt.tool_format import HERMES, LLAMA3, MISTRAL_LIST, SMOLLM2, CallSyntax
from ragcache.types import OutputRules

VOCAB_SIZE = 49152 + 40  # wider than the tokenizer, and no multiple of 32
ENDS = (2, 0)
SEEDS = range(12)


def function(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def closed_object(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


WORD = {"type": "string", "maxLength": 6}
SEARCH = function(
    "search", closed_object(query=WORD, limit={"type": "integer", "minimum": 1, "maximum": 50})
)
SEE = function("see", {"type": "object", "properties": {}})
TOOLS = (SEARCH, SEE)
ANSWER = {
    "type": "object",
    "properties": {"name": WORD, "age": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    "required": ["name"],
}
SEE_CALL = '<tool_call>[{"name": "see", "arguments": {}}]</tool_call>'
SEARCH_CALL = '<tool_call>[{"name": "search", "arguments": {"query": "é", "limit": 3}}]</tool_call>'
BOTH_CALLS = f"{SEE_CALL[: -len(']</tool_call>')]}, {SEARCH_CALL[len('<tool_call>[') :]}"


@pytest.fixture(scope="module")
def marked(build):
    """A small tokenizer with added tokens for calls and reasoning, and with special ones."""
    tokenizer = Tokenizer.from_str(build("byte_level", "none").backend_tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken("[CALLS]", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def make(marked):
    """Make a compiler for the small tokenizer."""

    def build(syntax=SMOLLM2, **options):
        return GrammarCompiler(
            marked,
            vocab_size=len(marked),
            eos_token_ids=[marked.eos_token_id],
            syntax=syntax,
            **options,
        )

    return build


@pytest.fixture(scope="module")
def make_smollm2(smollm2):
    """Make a compiler for the embedded model's tokenizer."""
    return lambda: GrammarCompiler(
        smollm2, vocab_size=VOCAB_SIZE, eos_token_ids=ENDS, syntax=SMOLLM2
    )


@pytest.fixture(scope="module")
def compiler(make_smollm2):
    """A compiler for the embedded model's tokenizer."""
    return make_smollm2()


@pytest.fixture(scope="module")
def unreadable(build):
    """A compiler for a tokenizer that the library cannot read."""
    tokenizer = build("wordpiece", "none")
    return GrammarCompiler(tokenizer, vocab_size=300, eos_token_ids=[2], syntax=HERMES)


def mask(constraint, vocab_size=VOCAB_SIZE):
    """For each token, and a few more up to the end of a word, whether it is allowed."""
    bits = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    constraint.fill_mask(bits)
    return np.unpackbits(bits.view(np.uint8), bitorder="little")


def takes(tokenizer, grammar, text):
    """Whether an output may be `text`, in the tokenizer's own tokens."""
    vocab_size = VOCAB_SIZE if len(tokenizer) > 1000 else len(tokenizer)
    constraint = grammar.constraint()
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not mask(constraint, vocab_size)[token]:
            return False
        constraint.advance(token)
    return constraint.finished or bool(mask(constraint, vocab_size)[tokenizer.eos_token_id])


def walk(tokenizer, grammar, seed, *, check=None):
    """A random output; soon it prefers tokens that complete something."""
    rng = np.random.default_rng(seed)
    closing = [ENDS[0], *tokenizer.convert_tokens_to_ids(['"', "}", "]", '"}', "}}"])]
    constraint = grammar.constraint()
    tokens = constraint.forced()
    for step in range(400):
        if constraint.finished:
            return tokenizer.decode(tokens)
        allowed = mask(constraint)
        if check is not None:
            check(tokenizer.decode(tokens), {end for end in ENDS if allowed[end]})
        preferred = [token for token in closing if allowed[token]] if step > 10 else []
        token = int(rng.choice(preferred or np.flatnonzero(allowed)))
        constraint.advance(token)
        if token in ENDS:
            return tokenizer.decode(tokens)
        tokens += [token, *constraint.forced()]
    raise AssertionError(f"no end: {tokenizer.decode(tokens)}")


FREE = OutputRules()
NO_CALLS = OutputRules("none")
REQUIRED = OutputRules("required")
JSON_OR_CALLS = OutputRules(schema=ANSWER)
RULES = {
    "none": (NO_CALLS, ["", "Hello.", "<tool_call> is markup"], [SEE_CALL, f"Hm. {SEE_CALL}"]),
    "auto": (
        FREE,
        [
            "",
            "Hello.",
            "<tool_call>[",
            SEE_CALL,
            SEARCH_CALL,
            f"Let me see.\n{SEE_CALL}",
            BOTH_CALLS,
        ],
        [
            SEE_CALL.replace("see", "sea"),
            SEE_CALL.replace("{}", '{"a": 1}'),
            SEE_CALL[:-1],
            SEE_CALL + " Done.",
            SEARCH_CALL.replace("3", "99"),
        ],
    ),
    "required": (REQUIRED, [SEE_CALL, BOTH_CALLS], ["", "Hello.", f"Hm. {SEE_CALL}"]),
    "named": (
        OutputRules("required", ("see",)),
        [SEE_CALL],
        [SEARCH_CALL, BOTH_CALLS],
    ),
    "allowed": (
        OutputRules("auto", ("search",)),
        ["Hello.", SEARCH_CALL],
        [SEE_CALL, BOTH_CALLS],
    ),
    "allowed none": (OutputRules("auto", ()), ["Hello."], [SEE_CALL]),
    "one": (OutputRules(parallel_tool_calls=False), ["", SEE_CALL, SEARCH_CALL], [BOTH_CALLS]),
    "JSON": (
        OutputRules("none", schema=ANSWER),
        ['{"name": "Zoë"}', '{"name": "", "age": null}', '{"name": "東京", "age": -3}'],
        ["", "{}", '{"name":"a"}', '{"name": "a", "size": 1}', '{"name": "\\u00eb"}', SEE_CALL],
    ),
    "JSON or calls": (
        JSON_OR_CALLS,
        ['{"name": "a"}', SEE_CALL, BOTH_CALLS],
        ["", "Hello.", f'{{"name": "a"}}{SEE_CALL}', f"Hm. {SEE_CALL}"],
    ),
    "calls before JSON": (OutputRules("required", schema=ANSWER), [SEE_CALL], ['{"name": "a"}']),
}


@pytest.mark.parametrize(("rules", "good", "bad"), RULES.values(), ids=RULES)
def test_outputs_that_keep_to_the_rules_and_no_others_are_allowed(
    smollm2, compiler, rules, good, bad
):
    grammar = compiler.compile(TOOLS, rules)
    assert [text for text in good if not takes(smollm2, grammar, text)] == []
    assert [text for text in bad if takes(smollm2, grammar, text)] == []


SYNTAXES = {"hermes": HERMES, "smollm2": SMOLLM2, "llama3": LLAMA3, "mistral": MISTRAL_LIST}


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
def test_calls_are_written_in_the_form_of_the_model(marked, make, syntax):
    calls = [("see", {}), ("search", {"query": "a, b:", "limit": 3})]
    compiler = make(syntax)
    for rules in (FREE, REQUIRED, JSON_OR_CALLS):
        grammar = compiler.compile(TOOLS, rules)
        assert [takes(marked, grammar, syntax.write([call])) for call in calls] == [True, True]
        assert takes(marked, grammar, syntax.write(calls)) == (syntax.separator is not None)
    others = [other for other in SYNTAXES.values() if other != syntax]
    required = compiler.compile(TOOLS, REQUIRED)
    assert not any(takes(marked, required, other.write(calls[:1])) for other in others)


def test_a_call_and_json_that_begin_alike_are_told_apart(marked, make):
    grammar = make(LLAMA3).compile(TOOLS, JSON_OR_CALLS)
    for text in ('{"name": "search"}', '{"name": "se", "age": 3}', LLAMA3.write([("see", {})])):
        assert takes(marked, grammar, text)
    assert not takes(marked, grammar, '{"name": "sea", "parameters": {}}')


def test_without_tools_and_schema_there_is_no_grammar(make, compiler):
    assert compiler.compile((), FREE) is None
    assert compiler.compile((), NO_CALLS) is None
    assert make(None).compile(TOOLS, FREE) is None


def test_a_form_of_calls_that_is_not_known_is_not_promised(marked, make):
    compiler = make(None)
    for rules, param in ((REQUIRED, "tool_choice"), (JSON_OR_CALLS, "response_format")):
        with pytest.raises(InvalidRequest) as caught:
            compiler.compile(TOOLS, rules)
        assert caught.value.param == param
    grammar = compiler.compile(TOOLS, OutputRules("none", schema=ANSWER))
    assert takes(marked, grammar, '{"name": "a"}')


@pytest.mark.parametrize("names", [("see",), ()])
def test_without_a_known_form_a_choice_of_tools_is_not_promised(make, unreadable, names):
    for compiler in (make(None), unreadable):
        with pytest.raises(InvalidRequest, match="cannot be enforced") as caught:
            compiler.compile(TOOLS, OutputRules("auto", names))
        assert caught.value.param == "tool_choice"
        assert compiler.compile(TOOLS, OutputRules("auto", ("see", "search"))) is None
        assert compiler.compile(TOOLS, OutputRules("none", names)) is None


def test_a_required_call_needs_a_tool(compiler):
    for tools, rules in (((), REQUIRED), (TOOLS, OutputRules("required", ("sea",)))):
        with pytest.raises(InvalidRequest) as caught:
            compiler.compile(tools, rules)
        assert caught.value.param == "tool_choice"


SCHEMAS = [
    ANSWER,
    closed_object(),
    closed_object(inner=closed_object(kind={"enum": ["a", "b, c", 3, None, "東京"]})),
    closed_object(kind={"const": {"deep": [1, "x: y"]}}, when={"type": "string", "format": "date"}),
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9}},
    {"anyOf": [closed_object(a=WORD), {"type": "null"}]},
    {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": closed_object(next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
        },
    },
    closed_object(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}),
    {"type": "object"},
    {},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_any_way_through_the_grammar_is_valid_and_laid_out_as_templates_do(
    smollm2, compiler, schema
):
    grammar = compiler.compile((), OutputRules(schema=schema))
    texts = {walk(smollm2, grammar, seed) for seed in SEEDS}
    validator = jsonschema_rs.validator_for(schema)
    for text in texts:
        value = json.loads(text)
        validator.validate(value)
        if not re.search(r"\d[.eE]", text):  # numbers have many forms
            assert json.dumps(value, ensure_ascii=False) == text


def test_an_object_without_properties_listed_is_free_and_one_with_none_is_empty(smollm2, compiler):
    rules = [OutputRules(schema=schema) for schema in ({"type": "object"}, closed_object(), True)]
    free, empty, anything = (compiler.compile((), each) for each in rules)
    text = '{"a": [1, {"b": null}], "c": "d"}'
    assert takes(smollm2, free, text)
    assert not takes(smollm2, empty, text)
    assert takes(smollm2, empty, "{}")
    assert takes(smollm2, anything, text)
    assert takes(smollm2, anything, "[]")
    assert not takes(smollm2, free, "[]")


def test_the_output_may_end_exactly_when_it_is_complete(smollm2, compiler):
    schema = {"anyOf": [{"type": "integer"}, ANSWER]}
    validator = jsonschema_rs.validator_for(schema)
    seen = set()

    def check(text, ends):
        try:
            complete = validator.is_valid(json.loads(text))
        except ValueError:
            complete = False
        assert ends == (set(ENDS) if complete else set())
        seen.add(complete)

    grammar = compiler.compile((), OutputRules(schema=schema))
    for seed in SEEDS:
        walk(smollm2, grammar, seed, check=check)
    assert seen == {True, False}


CALLS = re.compile(r"<tool_call>(\[.*\])</tool_call>", re.DOTALL)


@pytest.mark.parametrize("rules", [REQUIRED, OutputRules("required", parallel_tool_calls=False)])
def test_any_way_through_required_calls_can_be_read(smollm2, compiler, rules):
    grammar = compiler.compile(TOOLS, rules)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    numbers, names = set(), set()
    for seed in range(40):
        calls = json.loads(CALLS.fullmatch(walk(smollm2, grammar, seed))[1])
        for call in calls:
            assert list(call) == ["name", "arguments"]
            jsonschema_rs.validate(schemas[call["name"]], call["arguments"])
            names.add(call["name"])
        numbers.add(len(calls))
    assert names == set(schemas)
    assert numbers == {1} if not rules.parallel_tool_calls else numbers > {1}


def test_walks_are_repeatable(smollm2, compiler):
    grammar = compiler.compile(TOOLS, REQUIRED)
    first, second = ([walk(smollm2, grammar, seed) for seed in SEEDS] for _ in range(2))
    assert first == second
    assert len(set(first)) > 1


# Forced tokens.


def test_what_must_come_is_forced_in_the_tokens_of_the_tokenizer(smollm2, compiler):
    constraint = compiler.compile(TOOLS, REQUIRED).constraint()
    opening = '<tool_call>[{"name": "'
    assert constraint.forced() == smollm2.encode(opening)
    assert constraint.forced() == []  # it has gone on behind them
    names = {smollm2.decode([token]) for token in np.flatnonzero(mask(constraint))}
    assert {"s", "see", "search"} <= names
    assert all("see".startswith(name) or "search".startswith(name) for name in names)


def test_an_output_without_a_choice_is_forced_but_for_ambiguous_tokens(smollm2, compiler):
    grammar = compiler.compile(TOOLS, OutputRules("required", ("see",), parallel_tool_calls=False))
    assert walk(smollm2, grammar, seed=0) == SEE_CALL
    forced = grammar.constraint().forced()
    assert SEE_CALL.startswith(smollm2.decode(forced))
    assert len(forced) > len(smollm2.encode(SEE_CALL)) / 2


def test_nothing_is_forced_where_there_is_a_choice_or_nothing_left(smollm2, compiler):
    constraint = compiler.compile(TOOLS, FREE).constraint()
    assert constraint.forced() == []
    assert not constraint.finished
    constraint.advance(ENDS[1])
    assert constraint.finished
    assert constraint.forced() == []


def test_states_of_one_grammar_are_independent(smollm2, compiler):
    grammar = compiler.compile(TOOLS, REQUIRED)
    first, second = grammar.constraint(), grammar.constraint()
    forced = first.forced()
    assert second.forced() == forced != []


# Tokens that are markup.


@pytest.mark.parametrize(
    "syntax", [HERMES, CallSyntax("[CALLS]", " ", ""), CallSyntax("do [CALLS]", " ", "")]
)
def test_markup_in_the_form_of_calls_is_its_own_token(marked, make, syntax):
    compiler = make(syntax)
    call = syntax.write([("see", {})])
    mark = marked.convert_tokens_to_ids("<tool_call>" if syntax is HERMES else "[CALLS]")
    assert mark in marked.encode(call)
    for rules in (FREE, REQUIRED):
        assert takes(marked, compiler.compile(TOOLS, rules), call)
    assert mark in compiler.compile(TOOLS, REQUIRED).constraint().forced()
    without = compiler.compile(TOOLS, NO_CALLS).constraint()
    assert not mask(without, len(marked))[mark]


def test_free_text_may_hold_visible_markup_but_no_special_tokens(marked, make):
    grammar = make(HERMES).compile(TOOLS, FREE)
    call = HERMES.write([("see", {})])
    for text in ("<think>hm</think>", "<think></think>yes", f"<think>hm</think>\n\n{call}"):
        assert takes(marked, grammar, text)
    assert not takes(marked, grammar, "a<|eot|>")
    plain = make(CallSyntax("{{", " ", "}}")).compile(TOOLS, FREE)
    for text in ("<think>hm</think>\n\n{{see {}}}", "{{see {}}}", "<think>"):
        assert takes(marked, plain, text)
    assert not takes(marked, plain, "<think>hm</think>\n\n{{sea {}}}")


def test_markup_in_a_schema_is_text(marked, make):
    text = "<|im_end|> and <tool_call>"
    constraint = make().compile((), OutputRules(schema={"const": text})).constraint()
    tokens = []
    while not constraint.finished:
        tokens.append(int(np.flatnonzero(mask(constraint, len(marked)))[-1]))
        constraint.advance(tokens[-1])
        tokens += constraint.forced()
    assert json.loads(marked.decode(tokens)) == text
    assert not set(tokens) & set(marked.get_added_vocab().values())


def test_a_tokenizer_that_the_library_cannot_read_is_warned_of(build, caplog):
    GrammarCompiler(build("wordpiece", "none"), vocab_size=300, eos_token_ids=[2], syntax=HERMES)
    assert "decoder" in caplog.text


def test_with_a_tokenizer_that_the_library_cannot_read_nothing_is_promised(unreadable):
    assert unreadable.compile(TOOLS, FREE) is None
    assert unreadable.compile(TOOLS, NO_CALLS) is None
    for rules, param in ((REQUIRED, "tool_choice"), (JSON_OR_CALLS, "response_format")):
        with pytest.raises(InvalidRequest) as caught:
            unreadable.compile(TOOLS, rules)
        assert caught.value.param == param


# Schemas that cannot be enforced, and large ones.

HARD = {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}
BOMB = {"type": "integer"}
for _ in range(12):
    BOMB = {
        "allOf": [
            {"anyOf": [closed_object(x=BOMB), closed_object(z={})]},
            {"anyOf": [{"properties": {"q": {}}}, {"properties": {"y": {}}}]},
        ]
    }

INVALID = {
    "no type": ({"type": "nonsense"}, "Invalid type: nonsense"),
    "no regular expression": ({"type": "string", "pattern": "("}, "unclosed group"),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "unknown format": ({"type": "string", "format": "shoe-size"}, "Unknown format: shoe-size"),
    "unknown keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "no definition": ({"$ref": "#/$defs/a"}, "does not exist"),
    "elsewhere": ({"$ref": "https://example.com/a.json"}, "not fetch"),
    "endless": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "nothing"),
    "nothing": (False, "Unsatisfiable"),
    "contradiction": ({"allOf": [{"type": "string"}, {"type": "object"}]}, "Unsatisfiable"),
    "surrogate": ({"enum": ["\ud800"]}, "hex escape"),
    "not a number": ({"enum": [float("nan")]}, "expected value"),
    "too many values": ({"enum": [f"value-{i}-{i * i}" for i in range(100_000)]}, "over 256 KiB"),
    "too many properties": (closed_object(**{f"p{i}": {} for i in range(1001)}), "more than 1000"),
    "too complex after a few tokens": (
        {"type": "string", "pattern": "^((a|b| ){1,50}){1,50}$"},
        "too many",
    ),
    "too complex in the second property": (
        closed_object(a=WORD, b=HARD),
        "too many",
    ),
    "too many combinations": (BOMB, "too big"),
    "too deep": (json.loads('{"items":' * 101 + "{}" + "}" * 101), "deeper"),
}


@pytest.mark.parametrize(("schema", "message"), INVALID.values(), ids=INVALID)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(compiler, schema, message):
    with pytest.raises(InvalidRequest, match=f"^response_format: [^<]*{message}") as caught:
        compiler.compile((), OutputRules(schema=schema))
    assert caught.value.param == "response_format"
    assert "\n   1 |" not in caught.value.message


def test_the_tool_with_the_invalid_schema_is_named(compiler):
    tools = [SEE, function("bad", {"type": "object", "properties": {"a": {"type": "nonsense"}}})]
    with pytest.raises(InvalidRequest, match="nonsense") as caught:
        compiler.compile(tools, FREE)
    assert caught.value.param == "tools[1].function.parameters"
    compiler.compile(tools, OutputRules("auto", ("see",)))  # it is never called


def test_schemas_that_are_only_together_too_large_are_refused(make, monkeypatch):
    monkeypatch.setattr(grammar_module, "_LIMITS", LLParserLimits(max_grammar_size=500))
    compiler = make()
    tools = [
        function(f"f{i}", {"type": "object", "properties": {f"a{i}{j}": {} for j in range(12)}})
        for i in range(8)
    ]
    compiler.compile(tools[:1], FREE)
    with pytest.raises(InvalidRequest, match="together") as caught:
        compiler.compile(tools, FREE)
    assert caught.value.param == "tools"


def test_what_no_grammar_can_express_of_a_tool_is_ignored(smollm2, compiler):
    schema = closed_object(a={"type": "string", "format": "shoe-size"}) | {"x-order": 1}
    grammar = compiler.compile([function("f", schema)], REQUIRED)
    assert takes(smollm2, grammar, SMOLLM2.write([("f", {"a": "b"})]))
    assert not takes(smollm2, grammar, SMOLLM2.write([("f", {"a": 1})]))


def test_the_layout_is_not_the_clients_to_choose(smollm2, compiler):
    schema = {"type": "array", "x-guidance": {"whitespace_flexible": True, "item_separator": ";"}}
    grammar = compiler.compile((), OutputRules(schema=schema))
    assert takes(smollm2, grammar, "[1, 2]")
    assert not takes(smollm2, grammar, "[1;2]")
    assert not takes(smollm2, grammar, "[ 1, 2]")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"enum": [f"value-{i}" for i in range(10_000)]}, "value-9876", "value-98765"),
        ({"type": "string", "pattern": "^(a+)+$"}, "a" * 500, "a" * 500 + "b"),
        ({"type": "string", "pattern": "^[ab]*a[ab]{200}c$"}, "a" * 201 + "c", "a" * 200 + "c"),
        ({"type": "string", "maxLength": 10**9}, "a" * 500, None),
    ],
)
def test_large_schemas_and_costly_expressions_are_followed(smollm2, compiler, schema, good, bad):
    grammar = compiler.compile((), OutputRules(schema=schema))
    assert takes(smollm2, grammar, json.dumps(good))
    assert not takes(smollm2, grammar, json.dumps(bad))


def test_as_many_properties_as_are_accepted_can_be_followed(smollm2, compiler):
    names = [f"p{i}" for i in range(1000)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    grammar = compiler.compile((), OutputRules(schema=schema))
    assert takes(smollm2, grammar, json.dumps({"p1": "a", "p998": "b"}))


def test_schemas_are_limited_together(compiler):
    def tool(name):
        values = [f"{name}-{i:050}" for i in range(3_000)]
        return function(name, closed_object(a={"enum": values}))

    compiler.compile([tool("f")], FREE)
    with pytest.raises(InvalidRequest, match="over 256 KiB of schemas") as caught:
        compiler.compile([tool("f"), tool("g")], FREE)
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("syntax", [SMOLLM2, HERMES])
def test_the_tool_that_cannot_be_followed_is_named(marked, make, syntax):
    tools = [SEARCH, function("f", closed_object(text=HARD))]
    for rules in (FREE, REQUIRED):
        with pytest.raises(InvalidRequest, match="too many") as caught:
            make(syntax).compile(tools, rules)
        assert caught.value.param == "tools[1].function.parameters"


LATE = closed_object(**{f"p{i}": {"type": "string"} for i in range(8)}, code=HARD)


def fail(tokenizer, grammar, opening=""):
    """Follow a grammar of `LATE` until it fails, which is too late for the probe."""
    constraint = grammar.constraint()
    text = opening + json.dumps({f"p{i}": "" for i in range(8)} | {"code": "a" * 1000})

    def go_on():
        for token in tokenizer.encode(text, add_special_tokens=False):
            mask(constraint)
            constraint.advance(token)

    with pytest.raises(GenerationFailed, match="too many"):
        go_on()
    return constraint


@pytest.mark.parametrize(
    ("tools", "rules", "param"),
    [((), OutputRules(schema=LATE), "response_format"), ([function("f", LATE)], REQUIRED, "tools")],
)
def test_a_grammar_that_fails_its_first_request_is_refused_to_the_next(
    smollm2, make_smollm2, tools, rules, param
):
    compiler = make_smollm2()
    grammar = compiler.compile(tools, rules)
    constraint = fail(smollm2, grammar, SMOLLM2.opening("f") if tools else "")
    assert not constraint.finished
    assert constraint.forced() == []
    for ask in (compiler.find, compiler.compile):
        with pytest.raises(InvalidRequest, match=r"cannot be followed: .*too many") as caught:
            ask(tools, rules)
        assert caught.value.param == param


def test_a_grammar_that_outputs_have_followed_is_made_anew_when_it_has_grown_too_large(
    smollm2, make_smollm2
):
    compiler, rules = make_smollm2(), OutputRules(schema=LATE)
    answer = json.dumps({f"p{i}": "" for i in range(8)} | {"code": "a"})
    grammar = compiler.compile((), rules)
    assert takes(smollm2, grammar, answer)
    fail(smollm2, grammar)
    with pytest.raises(LookupError):
        compiler.find((), rules)
    renewed = compiler.compile((), rules)
    assert renewed is not grammar
    assert renewed is compiler.find((), rules)
    assert takes(smollm2, renewed, answer)


def test_a_token_that_is_not_allowed_is_an_error(compiler):
    constraint = compiler.compile(TOOLS, REQUIRED).constraint()
    with pytest.raises(GenerationFailed):
        constraint.advance(ENDS[0])


def test_a_model_without_an_end_token_ends_where_nothing_may_follow(marked):
    compiler = GrammarCompiler(marked, vocab_size=len(marked) + 9, eos_token_ids=(), syntax=SMOLLM2)
    constraint = compiler.compile((), OutputRules(schema={"const": "a"})).constraint()
    for token in marked.encode('"a"'):
        assert not constraint.finished
        constraint.advance(token)
    assert constraint.finished


# Remembered grammars.


def test_equal_rules_share_a_compiled_grammar(make):
    compiler = make(max_entries=2)
    first = compiler.compile(TOOLS, FREE)
    assert compiler.compile(json.loads(json.dumps(TOOLS)), OutputRules("auto")) is first
    other = compiler.compile(TOOLS, REQUIRED)
    assert other is not first
    assert compiler.compile(TOOLS, FREE) is first  # used last, so the other one goes
    compiler.compile(TOOLS, NO_CALLS)
    assert compiler.compile(TOOLS, FREE) is first
    assert compiler.compile(TOOLS, REQUIRED) is not other


def test_what_is_known_is_found_without_compiling(make, monkeypatch):
    compiler = make()
    bad = OutputRules(schema={"type": "nonsense"})
    for tools, rules in ((TOOLS, FREE), ((), NO_CALLS), ((), bad)):
        with pytest.raises(LookupError):
            compiler.find(tools, rules)
    grammar = compiler.compile(TOOLS, FREE)
    assert compiler.compile((), NO_CALLS) is None
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile((), bad)
    monkeypatch.setattr(compiler, "_form", None)  # what compiling would call
    monkeypatch.setattr(compiler, "_compile", None)
    assert compiler.find(json.loads(json.dumps(TOOLS)), FREE) is grammar
    assert compiler.find((), NO_CALLS) is None
    for ask in (compiler.find, compiler.compile):
        with pytest.raises(InvalidRequest, match=r"^response_format: Invalid type") as caught:
            ask((), bad)
        assert caught.value.param == "response_format"
        assert caught.value is not refused.value  # a raised exception keeps its frames


def test_values_nested_too_deep_for_a_key_are_refused(compiler):
    deep = {}
    for _ in range(100_000):
        deep = {"items": deep}
    for tools, rules, param in (
        ([function("f", deep)], NO_CALLS, "tools"),
        ((), OutputRules(schema=deep), "response_format"),
    ):
        for ask in (compiler.find, compiler.compile):
            with pytest.raises(InvalidRequest, match="too deep") as caught:
                ask(tools, rules)
            assert caught.value.param == param


@pytest.mark.parametrize(
    ("tools", "rules"),
    [
        ((SEE, SEARCH), FREE),
        ((SEE,), FREE),
        (TOOLS, OutputRules(parallel_tool_calls=False)),
        (TOOLS, OutputRules(allowed_tools=("see",))),
        (TOOLS, OutputRules(schema={})),
        ((SEARCH, function("see", {"type": "object"})), FREE),
    ],
)
def test_different_rules_do_not(make, tools, rules):
    compiler = make()
    assert compiler.compile(TOOLS, FREE) is not compiler.compile(tools, rules)


def test_threads_can_compile_and_follow_at_once(marked, make):
    compiler = make()
    text = SMOLLM2.write([("see", {}), ("search", {"query": "a", "limit": 3})])

    def follow(_):
        return takes(marked, compiler.compile(TOOLS, FREE), text)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(follow, range(32))) == [True] * 32
