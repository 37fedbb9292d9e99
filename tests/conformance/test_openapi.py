"""Requests made up from /openapi.json: no 5xx, and every answer is what the document says."""

from __future__ import annotations

import re

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
    max_examples=10,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
LIMITS = {"max_tokens": 8, "max_completion_tokens": 8, "n": 2}
CONVERSATION = {"messages": [{"role": "user", "content": "Where am I?"}]}
PROMPTS = {
    "/v1/chat/completions": CONVERSATION,
    "/v1/completions": {"prompt": "Where am I?"},
    "/v1/messages": CONVERSATION,
    "/v1/messages/count_tokens": CONVERSATION,
}
OPERATIONS = [(route.method, re.sub(r":[^}]*}", "}", route.path)) for route in ROUTES]

pytestmark = pytest.mark.usefixtures("gateway")  # for a fresh script


@pytest.fixture(scope="module")
def document(shared_gateway):
    return schemathesis.openapi.from_url(f"{shared_gateway.url}/openapi.json")


def adjusted(case, given):
    """Ask for little of a model that is served, and for `given`, where fields have a right type."""
    body = case.body
    if isinstance(body, dict):
        body.update(given)
        if isinstance(body.get("model"), str):
            body["model"] = "tiny"
        for field, most in LIMITS.items():
            if type(body.get(field)) is int:
                body[field] = min(body[field], most)
        if body.get("max_tokens") is None:
            body["max_tokens"] = 8
    return case


def answers(operation, mode, given, checks):
    """The statuses that made-up requests are answered with, once all checks have passed."""
    statuses = set()

    @EXAMPLES
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def run(case):
        response = adjusted(case, given).call_and_validate(checks=checks)
        statuses.add(response.status_code)

    run()
    return statuses


def test_the_document_is_openapi_and_has_every_route(document):
    document.validate()
    assert document.raw_schema["openapi"] == "3.1.0"
    paths = document.raw_schema["paths"]
    described = [(method.upper(), path) for path in paths for method in paths[path]]
    assert sorted(described) == sorted(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_what_the_document_allows_is_answered_as_it_says(document, method, path):
    statuses = answers(document[path][method], GenerationMode.POSITIVE, {}, CHECKS)
    assert statuses <= {200, 400, 404}
    assert statuses <= {200} or path in PROMPTS or "{" in path


@pytest.mark.parametrize("path", PROMPTS)
def test_a_good_prompt_is_answered_whatever_else_is_asked(document, path):
    given = PROMPTS[path]
    statuses = answers(document[path]["POST"], GenerationMode.POSITIVE, given, CHECKS)
    assert 200 in statuses


@pytest.mark.parametrize("path", PROMPTS)
def test_what_the_document_forbids_is_refused_as_it_says(document, path):
    checks = [*CHECKS, negative_data_rejection]
    statuses = answers(document[path]["POST"], GenerationMode.NEGATIVE, {}, checks)
    assert statuses == {400}
