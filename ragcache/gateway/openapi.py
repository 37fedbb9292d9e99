"""The description of our own routes (OpenAPI 3.1), made from their handlers and schemas."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from importlib.metadata import version
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ragcache.gateway.anthropic_schema import MessagesRequest, PromptFields
from ragcache.gateway.openai_schema import ChatCompletionRequest, CompletionRequest

Json = dict[str, Any]


BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": PromptFields,
}
_TEXT: Json = {"type": "string"}
_OPENAI_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR: Json = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "request_id": _TEXT,
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT},
        },
    },
}
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
        refs, schemas = models_json_schema(
            [(body, "validation") for body in BODIES.values()],
            ref_template="#/components/schemas/{model}",
        )
        bodies = {path: refs[body, "validation"] for path, body in BODIES.items()}
        paths: Json = {}
        for route in self._routes:
            path, parameters = _path(route.path)
            operation = _operation(route, bodies.get(path), parameters)
            if path not in self._open_paths:
                operation["security"] = [{}, *({name: []} for name in _KEYS)]
            paths.setdefault(path, {})[route.method.lower()] = operation
        errors = {"Error": _OPENAI_ERROR, "MessagesError": _ANTHROPIC_ERROR}
        return {
            "openapi": "3.1.0",
            "info": {"title": "ragcache", "version": version("ragcache-gateway")},
            "paths": paths,
            "components": {"schemas": schemas["$defs"] | errors, "securitySchemes": _KEYS},
        }


DESCRIPTION = web.AppKey("description", Description)


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json: this description."""
    return web.json_response(request.app[DESCRIPTION].document)


def _path(pattern: str) -> tuple[str, list[Json]]:
    """`/v1/models/{id:.+}` as OpenAPI writes it, with its parameters."""
    names = re.findall(r"{(\w+)", pattern)
    path = re.sub(r"{(\w+)[^}]*}", r"{\1}", pattern)
    return path, [
        {"name": name, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}
        for name in names
    ]


def _operation(route: web.RouteDef, body: Json | None, parameters: list[Json]) -> Json:
    summary = (route.handler.__doc__ or "").partition("\n")[0]
    error = "MessagesError" if route.path.startswith("/v1/messages") else "Error"
    operation: Json = {
        "summary": summary,
        "parameters": parameters,
        "responses": {"200": {"description": "OK"}, "default": _failure(error)},
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(body)}
    return operation


def _failure(schema: str) -> Json:
    content = _json({"$ref": f"#/components/schemas/{schema}"})
    return {"description": "The request was refused, or failed", "content": content}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}
