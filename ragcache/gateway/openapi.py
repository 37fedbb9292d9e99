"""The description of our own routes (OpenAPI 3.1), made from their handlers and schemas."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from importlib.metadata import version

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ragcache.gateway.anthropic.schema import MessagesRequest, PromptFields
from ragcache.gateway.failures import ANTHROPIC_ROUTE
from ragcache.gateway.openai.schema import ChatCompletionRequest, CompletionRequest
from ragcache.gateway.openapi_replies import (
    ANTHROPIC_ERROR,
    ERROR,
    REPLIES,
    TEXT,
    Json,
    json_content,
)

# The two APIs have parts of the same name, so each has its own prefix.
BODIES: dict[str, dict[str, type[BaseModel]]] = {
    "OpenAI": {
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/chat/completions/count_tokens": ChatCompletionRequest,
        "/v1/completions": CompletionRequest,
    },
    "Anthropic": {
        "/v1/messages": MessagesRequest,
        "/v1/messages/count_tokens": PromptFields,
    },
}
_REF = "#/components/schemas/{}"
_KEYS: Json = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


class Description:
    """Describes `routes`; those in `open_paths` need no API key."""

    def __init__(self, routes: Sequence[web.RouteDef], open_paths: Collection[str]) -> None:
        self._routes = routes
        self._open_paths = open_paths

    @cached_property
    def document(self) -> Json:
        """The OpenAPI document; making it takes some time, so only when it is asked for."""
        schemas: Json = {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}
        bodies: Json = {}
        for prefix, models in BODIES.items():
            refs, parts = models_json_schema(
                [(model, "validation") for model in models.values()],
                ref_template=_REF.format(prefix + "{model}"),
            )
            bodies |= {path: refs[model, "validation"] for path, model in models.items()}
            schemas |= {prefix + name: part for name, part in parts["$defs"].items()}
        return {
            "openapi": "3.1.0",
            "info": {"title": "ragcache", "version": version("ragcache-gateway")},
            "paths": self._paths(bodies),
            "components": {"schemas": schemas, "securitySchemes": _KEYS},
        }

    def _paths(self, bodies: Json) -> Json:
        paths: Json = {}
        for route in self._routes:
            path = re.sub(r"{(\w+)[^}]*}", r"{\1}", route.path)
            operation = _operation(route, path, bodies.get(path))
            if path not in self._open_paths:
                operation["security"] = [{}, *({name: []} for name in _KEYS)]
            paths.setdefault(path, {})[route.method.lower()] = operation
        return paths


DESCRIPTION = web.AppKey("description", Description)


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json: this description."""
    return web.json_response(request.app[DESCRIPTION].document)


def _operation(route: web.RouteDef, path: str, body: Json | None) -> Json:
    operation: Json = {
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}
            for name in re.findall(r"{(\w+)}", path)
        ],
        "responses": _responses(path),
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": json_content(body)}
    return operation


def _responses(path: str) -> Json:
    error = "AnthropicError" if path.startswith(ANTHROPIC_ROUTE) else "Error"
    refused = json_content({"$ref": _REF.format(error)})
    responses = {
        "200": {"description": "OK", "content": REPLIES[path]},
        "default": {"description": "The request was refused, or failed", "content": refused},
    }
    if path == "/ready":
        responses["503"] = {"description": "Not ready", "content": REPLIES[path]}
    return responses
