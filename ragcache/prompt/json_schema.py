"""JSON schemas as clients mean them: an object that lists its properties has no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ragcache.errors import InvalidRequest

MAX_DEPTH = 100  # nested objects and arrays; the grammar library reads no more than 127
MAX_PROPERTIES = 1000  # in one schema; the time to compile an object grows with their square

_SUBSCHEMAS = {"additionalProperties", "items"}
_SUBSCHEMA_LISTS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
_SUBSCHEMA_MAPS = {"$defs", "definitions", "patternProperties", "properties"}

_SAID_OF_STRINGS = {"const", "enum", "format", "maxLength", "minLength", "pattern"}
_CONDITIONS = {"dependentSchemas", "else", "if", "not", "then"}
_REFERENCES = {"$dynamicRef", "$ref", "allOf", "anyOf", "oneOf"}
_ASSERTIONS = {"items", "prefixItems", "properties", "required"}
_OPENING = {
    "additionalProperties",
    "minProperties",
    "patternProperties",
    "propertyNames",
    "unevaluatedProperties",
}


def closed(schema: Any, *, param: str | None = None) -> Any:
    """A copy in which objects that list `properties` have `additionalProperties` false.

    Pydantic and most other generators leave that out, and a small model then invents
    properties. Objects stay open that say anything about other properties themselves, that
    require one they do not list, or that are merged with another schema (`allOf`, or a `$ref`,
    `anyOf`, `oneOf` with siblings, conditions): closing one side of a merge would forbid the other.
    Data (`enum`, `const`, `default`, `examples`) is not touched.

    Raises:
        InvalidRequest: with `param`, when the schema is nested deeper than `MAX_DEPTH`, or lists
            more than `MAX_PROPERTIES`.
    """
    _check_limits(schema, param)
    if any(map(_refers, _merged(schema))):
        return schema  # what a merged reference leads to is merged as well
    return _close(schema)


def bounded(schema: Any, max_length: int) -> Any:
    """A copy in which strings that may be of any length have `maxLength`.

    A small model repeats itself in a string until its tokens run out. Strings that say anything
    about their content themselves stay as they are, and so does data.
    """
    if not isinstance(schema, Mapping):
        return schema
    copy = _map_subschemas(schema, lambda each: bounded(each, max_length))
    kinds = schema.get("type")
    is_string = kinds == "string" or (isinstance(kinds, list | tuple) and "string" in kinds)
    if is_string and not _SAID_OF_STRINGS & schema.keys():
        copy["maxLength"] = max_length
    return copy


def _map_subschemas(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    copy = dict(schema)
    for key, value in schema.items():
        if key in _SUBSCHEMA_MAPS and isinstance(value, Mapping):
            copy[key] = {name: change(each) for name, each in value.items()}
        elif key in _SUBSCHEMA_LISTS and isinstance(value, list | tuple):
            copy[key] = [change(each) for each in value]
        elif key in _SUBSCHEMAS:
            copy[key] = change(value)
    return copy


def _check_limits(schema: Any, param: str | None) -> None:
    level, num_properties = [schema], 0
    for _ in range(MAX_DEPTH + 1):
        num_properties += sum(map(_num_properties, level))
        if num_properties > MAX_PROPERTIES:
            reason = f"more than {MAX_PROPERTIES} properties"
            raise InvalidRequest(f"{param or 'schema'}: {reason}", param=param)
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise InvalidRequest(f"{param or 'schema'}: nested deeper than {MAX_DEPTH}", param=param)


def _num_properties(schema: Any) -> int:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return len(properties) if isinstance(properties, Mapping) else 0


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _close(schema: Any) -> Any:
    if not isinstance(schema, Mapping) or _is_merged(schema):
        return schema
    copy = _map_subschemas(schema, _close)
    if _is_complete(schema):
        copy["additionalProperties"] = False
    return copy


def _is_complete(schema: Mapping[str, Any]) -> bool:
    """Whether the properties listed can be all that there are."""
    properties, required = schema.get("properties"), schema.get("required", ())
    return (
        isinstance(properties, Mapping)
        and not _OPENING & schema.keys()
        and isinstance(required, list | tuple)
        and all(isinstance(name, str) and name in properties for name in required)
    )


def _is_merged(schema: Mapping[str, Any]) -> bool:
    """Whether an instance has to follow more than one list of properties at once."""
    references = _REFERENCES & schema.keys()
    if not references:
        return bool(_CONDITIONS & schema.keys())
    others = (_REFERENCES | _ASSERTIONS | _OPENING | _CONDITIONS) & schema.keys()
    all_of = schema.get("allOf", ())
    return len(others) > 1 or (isinstance(all_of, list | tuple) and len(all_of) > 1)


def _merged(value: Any) -> Iterable[Any]:
    """All schemas that are merged; inside data as well, which does no harm."""
    if isinstance(value, Mapping) and _is_merged(value):
        yield value
    else:
        for child in _children(value):
            yield from _merged(child)


def _refers(value: Any) -> bool:
    if isinstance(value, Mapping) and ("$ref" in value or "$dynamicRef" in value):
        return True
    return any(map(_refers, _children(value)))
