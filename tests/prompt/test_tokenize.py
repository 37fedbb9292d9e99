from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.errors import ContextLengthExceeded, InvalidRequest
from ragcache.prompt.tokenize import PromptTokenizer, TokenizerPool
from ragcache.types import ChatPrompt, Message

Chat = Callable[..., ChatPrompt]
Prompts = Callable[..., PromptTokenizer]
conversations = st.lists(
    st.builds(
        Message,
        st.sampled_from(["system", "user", "assistant"]),
        st.text("aé 東\n<|.", max_size=30),
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module")
def pool(smollm2: Any) -> Iterator[TokenizerPool]:
    pool = TokenizerPool(smollm2)
    yield pool
    pool.close()


def reference(tokenizer: Any, prompt: ChatPrompt) -> list[int]:
    messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return list(encoded["input_ids"])


@settings(deadline=None)
@given(conversations)
def test_tokens_are_those_of_apply_chat_template(
    smollm2: Any, smollm2_prompts: PromptTokenizer, messages: list[Message]
) -> None:
    prompt = ChatPrompt(tuple(messages))
    assert smollm2_prompts.encode_chat(prompt).token_ids == reference(smollm2, prompt)


@settings(deadline=None, max_examples=40)
@given(messages=conversations)
def test_every_family_gives_the_tokens_of_apply_chat_template(
    messages: list[Message], family: str, build: Any, prompts: Prompts
) -> None:
    for template in ("chatml", "llama3"):
        prompt = ChatPrompt(tuple(messages))
        expected = reference(build(family, template), prompt)
        assert prompts(family, template).encode_chat(prompt).token_ids == expected


def test_a_bos_of_the_template_is_not_doubled(build: Any, prompts: Prompts, chat: Chat) -> None:
    prompt = prompts("metaspace", "llama2").encode_chat(chat("hi"))
    bos_id = build("metaspace", "llama2").bos_token_id
    assert prompt.token_ids.count(bos_id) == 1
    assert prompt.text == "<s>[INST] hi [/INST]"


def test_raw_text_is_encoded_as_the_tokenizer_does_it(
    smollm2: Any, smollm2_prompts: PromptTokenizer, build: Any, prompts: Prompts
) -> None:
    text = "<|im_start|>user\nhi"
    assert smollm2_prompts.encode_text(text).token_ids == smollm2(text)["input_ids"]
    metaspace = build("metaspace", "chatml")
    ids = prompts("metaspace").encode_text("hi").token_ids
    assert ids == metaspace("hi")["input_ids"]
    assert ids[0] == metaspace.bos_token_id


def test_raw_text_needs_no_chat_template(prompts: Prompts) -> None:
    assert prompts("byte_level", "none").encode_text("hi").token_ids


def test_raw_text_that_is_empty_or_no_text_is_refused(smollm2_prompts: PromptTokenizer) -> None:
    for text in ("", "\ud83d"):
        with pytest.raises(InvalidRequest) as error:
            smollm2_prompts.encode_text(text)
        assert error.value.param == "prompt"


def test_odd_but_valid_content_is_encoded(smollm2_prompts: PromptTokenizer, chat: Chat) -> None:
    for text in ("", "\x00", "\ufffd", "x" * 10_000, "\ufdd0\ufdd1", "\ufeffa\r\n", "e\u0301"):
        prompt = smollm2_prompts.encode_chat(chat(text))
        assert prompt.text.endswith(f"user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        assert len(prompt.token_ids) > 4
    many = chat(*["a"] * 2000)
    assert smollm2_prompts.encode_chat(many).token_ids.count(2) == 2001


def test_a_prompt_may_fill_the_context_but_not_exceed_it(
    smollm2_prompts: PromptTokenizer, chat: Chat
) -> None:
    prompt = chat("hello " * 20)
    length = len(smollm2_prompts.encode_chat(prompt).token_ids)
    assert len(smollm2_prompts.encode_chat(prompt, max_tokens=length).token_ids) == length
    with pytest.raises(ContextLengthExceeded, match=f"{length} tokens.* {length - 1}$") as error:
        smollm2_prompts.encode_chat(prompt, max_tokens=length - 1)
    assert error.value.param == "messages"


def test_text_that_is_certainly_too_long_is_refused_unencoded(
    smollm2_prompts: PromptTokenizer, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2_prompts, "_encoder", None)
    with pytest.raises(ContextLengthExceeded, match="too long: at least"):
        smollm2_prompts.encode_chat(chat("a b " * 50_000), max_tokens=1000)
    with pytest.raises(ContextLengthExceeded, match="too long: at least"):
        smollm2_prompts.encode_text("a b " * 50_000, max_tokens=1000)


def test_a_truncating_tokenizer_of_the_caller_does_not_truncate(build: Any, chat: Chat) -> None:
    tokenizer = copy.deepcopy(build("byte_level", "chatml"))
    tokenizer.backend_tokenizer.enable_truncation(4)
    prompts = PromptTokenizer(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert len(prompts.encode_chat(chat("one two three four five")).token_ids) > 10


async def test_concurrent_prompts_get_the_tokens_of_serial_ones(
    pool: TokenizerPool, smollm2_prompts: PromptTokenizer, chat: Chat
) -> None:
    chats = [chat("shared words", "ok", f"document {i} <|im_end|> " * (i + 1)) for i in range(50)]
    results = await asyncio.gather(*map(pool.encode_chat, chats), pool.encode_text("raw"))
    expected = [smollm2_prompts.encode_chat(prompt).token_ids for prompt in chats]
    assert [result.token_ids for result in results[:-1]] == expected
    ends = [result.layout().segments[-1].end for result in results[:-1]]
    assert ends == [len(ids) for ids in expected]


async def test_the_event_loop_runs_while_a_huge_prompt_is_encoded(
    pool: TokenizerPool, chat: Chat
) -> None:
    encoding = asyncio.ensure_future(pool.encode_chat(chat("lorem ipsum dolor " * 120_000)))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len((await encoding).token_ids) > 100_000
    assert turns > 20


def test_a_conversation_is_remembered_only_in_its_scope(
    smollm2_prompts: PromptTokenizer, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    memo = smollm2_prompts._encoder._remembered
    original = memo._encode
    monkeypatch.setattr(memo, "_encode", lambda text: encoded.append(text) or original(text))
    for scope in ("one tenant", "another", "one tenant", "another"):
        smollm2_prompts.encode_chat(chat("a passage"), scope=scope)
    assert encoded.count("user\na passage") == 2


async def test_large_prompts_leave_the_threads_to_small_ones(
    smollm2: Any, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = TokenizerPool(smollm2, workers=1)
    huge, release = "x" * 1_100_000, threading.Event()

    def hold(encode: Callable[..., Any]) -> Callable[..., Any]:
        def encode_unless_huge(prompt: Any, *options: Any) -> Any:
            if huge not in str(prompt):
                return encode(prompt, *options)
            release.wait()
            return MagicMock()

        return encode_unless_huge

    for method in ("encode_chat", "encode_text"):
        monkeypatch.setattr(pool.prompts, method, hold(getattr(pool.prompts, method)))
    call = {"function": {"name": "f", "arguments": huge}}
    large = [
        pool.encode_text(huge),
        pool.encode_chat(chat("hi", huge)),
        pool.encode_chat(chat("hi", Message("assistant", "", tool_calls=(call,)))),
        pool.encode_chat(chat("hi", tools=[{"function": {"name": "f", "enum": [huge]}}])),
        pool.encode_chat(chat("hi", title=huge)),
    ]
    waiting = [asyncio.ensure_future(encoding) for encoding in large]
    try:
        small = await asyncio.wait_for(pool.encode_chat(chat("small")), timeout=20)
        assert small.layout().segments[-1].end == len(small.token_ids)
        assert not any(encoding.done() for encoding in waiting)
    finally:
        release.set()
        await asyncio.gather(*waiting)
        pool.close()


async def test_what_is_soon_encoded_needs_no_thread(smollm2: Any, chat: Chat) -> None:
    pool = TokenizerPool(smollm2)
    passage = "It is said that a lighthouse is seen from afar. " * 50
    await pool.encode_chat(chat(passage))
    pool.close()
    longer = chat(passage, "Seen by whom?", "By all.")
    expected = pool.prompts.encode_chat(longer).token_ids
    assert (await pool.encode_chat(longer)).token_ids == expected
    for prompt, scope in (longer, "another tenant"), (chat(passage, passage.upper()), ""):
        with pytest.raises(RuntimeError, match="after shutdown"):
            await pool.encode_chat(prompt, scope=scope)


async def test_a_layout_is_found_on_the_thread_that_encodes(
    pool: TokenizerPool, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = await pool.encode_chat(chat("It is said. " * 500))
    monkeypatch.setattr(pool.prompts.template, "render", None)
    assert prompt.layout().segments[-1].end == len(prompt.token_ids)


async def test_counting_does_not_look_for_the_layout(
    pool: TokenizerPool, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = len((await pool.encode_chat(chat("hi"))).token_ids)
    outline = MagicMock(side_effect=AssertionError)
    monkeypatch.setattr("ragcache.prompt.layout.outline", outline)
    assert await pool.count_tokens(chat("hi"), length) == length
    with pytest.raises(ContextLengthExceeded):
        await pool.count_tokens(chat("hi"), length - 1)
    assert not outline.called
    with pytest.raises(AssertionError):
        await pool.encode_chat(chat("They do say. " * 500))


async def test_errors_reach_the_caller(pool: TokenizerPool, chat: Chat) -> None:
    with pytest.raises(InvalidRequest, match="at least one message"):
        await pool.encode_chat(chat())


async def test_a_pool_reads_tokens_back(pool: TokenizerPool) -> None:
    prompt = await pool.encode_text("grüße 😀")
    assert pool.detokenizer().push(prompt.token_ids) == "grüße 😀"
    assert b"".join(pool.token_text(id)[1] for id in prompt.token_ids).decode() == "grüße 😀"


async def test_token_ids_read_as_their_text_and_are_one_segment(pool: TokenizerPool) -> None:
    ids = (await pool.encode_text("<|im_start|>grüße 😀!")).token_ids
    prompt = await pool.read_tokens(ids)
    assert (prompt.token_ids, prompt.text) == (ids, "<|im_start|>grüße 😀!")
    assert prompt.layout().segments == (("prompt", 0, len(ids)),)
    assert await pool.place(prompt, 1) == ("prompt", len("<|im_start|>"))
    assert await pool.place(prompt, len(ids) - 1) == ("prompt", len("<|im_start|>grüße 😀"))


def test_packed_tokens_are_the_tokens(smollm2):
    messages = (Message("system", "Be brief."), Message("user", "a <|im_end|> and 東京"))
    prompt = PromptTokenizer(smollm2).encode_chat(ChatPrompt(messages))
    assert list(prompt.packed()) == prompt.token_ids
