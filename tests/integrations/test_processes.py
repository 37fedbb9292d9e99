"""Chat models and the processes that they are copied to, and that end with them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
from langchain_core.load import dumps
from langchain_ragcache import ChatRagcache

QUESTION = "What will I see?"

FORK = """
import multiprocessing, sys
from langchain_ragcache import ChatRagcache

model = ChatRagcache(base_url=sys.argv[1])
stream = model.stream("hi")
next(stream)
with multiprocessing.get_context("fork").Pool(2) as pool:
    answers = pool.map(model.invoke, ["hi"] * 2)
assert [answer.text for answer in answers] == [model.invoke("hi").text] * 2
assert [chunk for chunk in stream if chunk.usage_metadata]
"""

ELSEWHERE = """
import pickle, sys

def heavy():
    return {"ragcache", "torch", "transformers", "langgraph"} & sys.modules.keys()

import langchain_ragcache
assert not heavy()
model = pickle.loads(bytes.fromhex(sys.argv[1]))
print(model.invoke(sys.argv[2]).text)
assert not heavy()
"""

MODEL = """
import asyncio, itertools, sys, threading
from langchain_ragcache import ChatRagcache

model = ChatRagcache(base_url=sys.argv[1] or None, max_tokens=int(sys.argv[2]))
"""

# Ways to end in the middle of answers.
ENDINGS = {
    "of streams": """
held = model.stream("hi")
next(held)
for _ in model.stream("hi"):
    break

async def main():
    global task, stream
    task = asyncio.create_task(model.ainvoke("hi"))
    stream = model.astream("hi")
    async for _ in stream:
        break

asyncio.run(main())
""",
    "of the script": """
for _ in model.stream("hi"):
    sys.exit()
""",
    "of the main thread": """
def read():
    for _ in itertools.islice(model.stream("hi"), 100):
        begun.set()

begun = threading.Event()
threading.Thread(target=read).start()
begun.wait()
""",
}


def run(code, *arguments, options=("-X", "dev")):
    """What a new interpreter prints; it must end by itself, without a word of complaint."""
    command = [sys.executable, "-W", "error", *options, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_in_the_middle_of_answers(gateway, engine, ending):
    gateway.script.free = True
    run(MODEL + ENDINGS[ending], gateway.url, "4000")
    engine.stops()


def test_a_fork_begins_anew(gateway):
    run(FORK, gateway.url, options=())  # where threads run, newer interpreters warn of forks


@pytest.fixture
def model(gateway):
    options = {"base_url": gateway.url, "api_key": "secret", "stop": ["lighthouse"], "seed": 3}
    model = ChatRagcache(**options, default_headers={"X-Test": "1"}, extra_body={"top_k": 5})
    model.invoke(QUESTION)  # so that there is a connection, and a model is known
    return model


def test_another_process_has_the_same_model_and_needs_nothing_of_the_engine(model):
    printed = run(ELSEWHERE, pickle.dumps(model).hex(), QUESTION)
    assert printed == model.invoke(QUESTION).text + "\n" == "It is said that you will see a \n"


COPIES = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
    "model_copy": lambda model: model.model_copy(),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_the_same_model(model, how):
    same = COPIES[how](model)
    assert same == model
    assert same._body([], None, {}) == model._body([], None, {})
    assert same.api_key.get_secret_value() == "secret"
    assert same.invoke(QUESTION).text == "It is said that you will see a "


def test_nothing_that_is_written_of_a_model_has_its_key():
    model = ChatRagcache(api_key="sesame", default_headers={"X-Key": "sesame"})
    texts = [repr(model), str(model), dumps(model), str(model._identifying_params)]
    texts += [str(model._get_ls_params()), str(model._get_invocation_params())]
    assert not [text for text in texts if "sesame" in text]
