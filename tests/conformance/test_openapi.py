"""Requests made up from /openapi.json: no 5xx, and every answer is what the document says."""

from __future__ import annotations

import copy
import re
from types import MappingProxyType

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from ragcache.gateway.app import ROUTES

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = settings(
    max_examples=6,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MOST_TOKENS = 8
CHAT = "/v1/chat/completions"
CONVERSATION = {"messages": [{"role": "user", "content": "Where am I?"}]}
PROMPTS = {
    CHAT: CONVERSATION,
    f"{CHAT}/count_tokens": CONVERSATION,
    "/v1/completions": {"prompt": "Where am I?"},
    "/v1/messages": CONVERSATION,
    "/v1/messages/count_tokens": CONVERSATION,
}
OPERATIONS = [(route.method, re.sub(r":[^}]*}", "}", route.path)) for route in ROUTES]


@pytest.fixture(scope="module")
def document(shared_gateway):
    return schemathesis.openapi.from_url(f"{shared_gateway.url}/openapi.json")


@pytest.fixture(scope="module")
def without_prompts(document):
    """The document without prompts, which are most of a body and take most of the time."""
    raw = copy.deepcopy(document.raw_schema)
    for schema in raw["components"]["schemas"].values():
        for field in {"messages", "prompt"} & set(schema["properties"]):
            del schema["properties"][field]
            schema["required"].remove(field)
    return schemathesis.openapi.from_dict(raw)


def adjust(case, given):
    """Ask for little of a model that is served, and for `given`, where fields have a right type."""
    body = case.body
    if not isinstance(body, dict):
        return
    body.update(given)
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    for field in ("max_tokens", "max_completion_tokens"):
        if type(body.get(field)) is int:
            body[field] = min(body[field], MOST_TOKENS)
    if case.path == CHAT and body.get("max_tokens") is None:  # else all that fit
        body["max_tokens"] = MOST_TOKENS


@pytest.fixture
def answers(gateway):
    """The statuses that made-up requests are answered with, once all checks have passed."""

    def answers(operation, mode=GenerationMode.POSITIVE, checks=CHECKS, given=MappingProxyType({})):
        statuses = set()

        @EXAMPLES
        @hypothesis.given(operation.as_strategy(generation_mode=mode))
        def run(case):
            adjust(case, given)
            response = case.call_and_validate(base_url=gateway.url, checks=checks)
            statuses.add(response.status_code)

        run()
        return statuses

    return answers


def test_the_document_is_openapi_and_has_every_route(document):
    document.validate()
    assert document.raw_schema["openapi"] == "3.1.0"
    paths = document.raw_schema["paths"]
    described = [(method.upper(), path) for path in paths for method in paths[path]]
    assert sorted(described) == sorted(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_what_the_document_allows_is_answered_as_it_says(document, answers, method, path):
    statuses = answers(document[path][method])
    assert statuses <= {200, 400, 404}
    assert statuses <= {200} or path in PROMPTS or "{" in path


@pytest.mark.parametrize("path", PROMPTS)
def test_a_good_prompt_is_answered_whatever_else_is_asked(without_prompts, answers, path):
    assert 200 in answers(without_prompts[path]["POST"], given=PROMPTS[path])


@pytest.mark.parametrize("path", PROMPTS)
def test_what_the_document_forbids_is_refused_as_it_says(document, answers, path):
    checks = [*CHECKS, negative_data_rejection]
    assert answers(document[path]["POST"], GenerationMode.NEGATIVE, checks) == {400}
