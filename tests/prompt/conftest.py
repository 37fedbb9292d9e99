"""Small tokenizers of the common families, made here, with chat templates of several styles."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from ragcache.prompt.tokenize import PromptTokenizer
from ragcache.prompt.tool_format import ToolFormat, adapted_format, native_format
from ragcache.types import ChatPrompt, Message

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog isn't amused.",
    "Retrieved documents: 1. KV caches 2. block tables 3. prefix sharing",
    "def main():\n    return {'a': 1, \"b\": [2, 3]}\n\n",
    "naïve café — Grüße, 東京 😀 مرحبا",
    "system user assistant tool content",
] * 3

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

HERMES = """\
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
{{- '# Tools\n<tools>' }}{% for t in tools %}{{- '\n' + (t | tojson) }}{% endfor %}
{{- '\n</tools>\nCall with <tool_call>{...}</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- for m in (messages[1:] if messages[0].role == 'system' else messages) %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and '<think>' in m.content and '</think>' in m.content %}
{{- m.content.split('</think>')[-1].lstrip('\n') }}
{%- else %}{{- m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}{% if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start|>system<|end|>\n\n' }}{% if tools %}{{- 'Environment: ipython\n' }}{% endif %}
{{- system + '<|eot|>' }}
{%- for m in messages %}{{- '<|start|>' + m.role + '<|end|>\n\n' }}
{%- if loop.first and tools %}{{- 'Use these functions:\n\n' }}
{%- for t in tools %}{{- t | tojson(indent=2) }}{{- '\n\n' }}{% endfor %}{% endif %}
{%- if m.tool_calls %}{{- '{"name": "' + m.tool_calls[0].function.name + '", ' }}
{{- '"parameters": ' }}{{- (m.tool_calls[0].function.arguments | tojson) + '}' }}{% else %}
{{- m.content | trim }}{% endif %}{{- '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{% endif %}"""

LLAMA2 = """\
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant') }}{% endif %}
{%- if m.role == 'user' %}{{- bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}
{%- else %}{{- ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

LAST_TOOLS = """\
{%- for m in messages %}{% if m.role == 'user' %}
{%- if tools and loop.last %}{{- '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}{% elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}{{- '{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}' }}{{- '' if loop.last else ', ' }}{% endfor %}
{{- ']</s>' }}{% else %}{{- m.content + '</s>' }}{% endif %}
{%- endfor %}"""

# What real templates hold of their model's form of calls; the rest of them does not matter here.
FORMS = {
    "hermes": """'<tool_call>\\n{"name": "' '", "arguments": '""",
    "qwen3": """'<think>' '<tool_call>\\n{"name": "' '", "arguments": '""",
    "qwen_xml": "'<tool_call>\\n<function=' + call.name + '>' call.arguments",
    "llama3": """'Environment: ipython' '{"name": ' '"parameters": '""",
    "mistral_list": "'[TOOL_CALLS] ['",
    "mistral": "'[TOOL_CALLS]' + name + '[ARGS]'",
    "glm": "'<tool_call>' + name '<arg_key>' arguments",
}

CLOCK = "{{ strftime_now('%d %b %Y %H:%M:%S') + '\n' }}" + CHATML

TEMPLATES = {
    "chatml": CHATML,
    "hermes": HERMES,
    "llama3": LLAMA3,
    "llama2": LLAMA2,
    "last_tools": LAST_TOOLS,
    "clock": CLOCK,
    "none": None,
}

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the documents",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    },
)


def byte_level() -> Tokenizer:
    """Byte-level BPE, like GPT-2 and most models since."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    visible = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in visible])
    return tokenizer


def _sentencepiece_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_byte_tokens_plain(tokenizer)


def _with_byte_tokens_plain(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer makes all given tokens special; byte tokens are ordinary ones."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """SentencePiece BPE with byte tokens; a space goes before the start of a text (Mistral)."""
    return _sentencepiece_bpe()


def prepending() -> Tokenizer:
    """The same with a space before the start of every stretch between special tokens (Llama 2)."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = None
    return tokenizer


def unigram() -> Tokenizer:
    """Unigram, whose model holds the special tokens as ordinary pieces too (T5)."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """WordPiece, whose decoder sets the spaces (BERT)."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


FAMILIES = {
    "byte_level": byte_level,
    "metaspace": metaspace,
    "prepending": prepending,
    "unigram": unigram,
    "wordpiece": wordpiece,
}


@cache
def _build(family: str, template: str) -> Any:
    tokenizer = FAMILIES[family]()
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    if family == "byte_level":
        tokens = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    wrapped.chat_template = TEMPLATES[template]
    return wrapped


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each kind of tokenizer in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def build() -> Callable[[str, str], Any]:
    """Make the tokenizer of a family with one of the chat templates, as transformers has it."""
    return _build


@pytest.fixture(scope="session")
def prompts() -> Callable[[str, str], PromptTokenizer]:
    """Make the PromptTokenizer for a family and a chat template."""
    return cache(lambda family, template="chatml": PromptTokenizer(_build(family, template)))


@pytest.fixture(scope="session")
def chat() -> Callable[..., ChatPrompt]:
    """Make a conversation; bare strings alternate between user and assistant."""

    def make(*turns: Any, tools: Any = (), **options: Any) -> ChatPrompt:
        roles = ("user", "assistant")
        messages = [
            turn if isinstance(turn, Message) else Message(roles[place % 2], turn)
            for place, turn in enumerate(turns)
        ]
        return ChatPrompt(tuple(messages), tuple(tools), options)

    return make


@pytest.fixture(scope="session")
def tools() -> Any:
    """One tool definition, in OpenAI's form."""
    return TOOLS


@pytest.fixture(scope="session")
def forms() -> Callable[[str], ToolFormat]:
    """The form of tool calls of a family of models."""
    tokenizer = _build("byte_level", "chatml")
    forms = {name: native_format(source, tokenizer) for name, source in FORMS.items()}
    return {**forms, "smollm2": adapted_format("", tokenizer)}.__getitem__


@pytest.fixture(scope="session")
def smollm2_prompts(smollm2: Any) -> PromptTokenizer:
    return PromptTokenizer(smollm2)
