"""Which objects are closed, and which must stay open."""

import copy

import pytest

from ragcache.errors import InvalidRequest
from ragcache.prompt.json_schema import MAX_DEPTH, MAX_PROPERTIES, bounded, closed

POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
CLOSED_POINT = POINT | {"additionalProperties": False}


def test_objects_that_list_properties_are_closed():
    assert closed(POINT) == CLOSED_POINT
    assert closed({"type": "object", "properties": {}})["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        POINT | {"additionalProperties": True},
        POINT | {"additionalProperties": {"type": "string"}},
        POINT | {"patternProperties": {"^y": {}}},
        POINT | {"unevaluatedProperties": True},
        POINT | {"minProperties": 2},
        POINT | {"required": ["y"]},
        POINT | {"required": [["x"]]},
        {"type": "object", "properties": ["x"]},
        {"type": "string"},
        True,
        "nonsense",
    ],
)
def test_what_speaks_of_other_properties_itself_stays_as_it_is(schema):
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "wrap",
    [
        lambda point: {"type": "object", "additionalProperties": point},
        lambda point: {"type": "array", "items": point},
        lambda point: {"type": "array", "items": [point, point]},
        lambda point: {"type": "array", "prefixItems": [point]},
        lambda point: {"anyOf": [point, {"type": "null"}]},
        lambda point: {"description": "Either.", "oneOf": [point, {"type": "null"}]},
        lambda point: {"title": "An old Pydantic field", "allOf": [point]},
        lambda point: {"$ref": "#/$defs/point", "$defs": {"point": point}},
        lambda point: {"$ref": "#/definitions/point", "definitions": {"point": point}},
        lambda point: {"patternProperties": {"^p": point}},
        lambda point: {
            "type": "object",
            "properties": {"required": point},
            "additionalProperties": False,
        },
    ],
)
def test_objects_are_closed_wherever_they_stand(wrap):
    assert closed(wrap(POINT)) == wrap(CLOSED_POINT)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [POINT, {"properties": {"y": {"type": "number"}}}]},
        POINT | {"anyOf": [{"properties": {"y": {}}}, {"properties": {"z": {}}}]},
        POINT | {"$ref": "#/$defs/other", "$defs": {"other": {"properties": {"y": {}}}}},
        POINT | {"if": {"properties": {"x": {"const": 1}}}, "then": {"required": ["y"]}},
        POINT | {"not": {"required": ["y"]}},
        # The definition is merged where it is referred to.
        {"allOf": [{"$ref": "#/$defs/p"}, {"properties": {"y": {}}}], "$defs": {"p": POINT}},
        {
            "type": "array",
            "items": {"$ref": "#/$defs/p", "required": ["y"]},
            "$defs": {"p": POINT},
        },
    ],
)
def test_merged_objects_stay_open_as_closing_one_would_forbid_the_other(schema):
    assert closed(schema) == schema


@pytest.mark.parametrize("key", ["enum", "const", "default", "examples"])
def test_data_is_not_taken_for_schemas(key):
    data = [{"properties": {}}]
    assert closed({"properties": {"a": {key: data}}})["properties"]["a"] == {key: data}


def test_the_schema_given_is_not_changed():
    schema = {"type": "array", "items": POINT}
    before = copy.deepcopy(schema)
    assert closed(schema) != schema
    assert schema == before


@pytest.mark.parametrize("keys", [("items",), ("properties", "a"), ("anyOf", 0), ("const", 0)])
def test_deep_nesting_is_refused(keys):
    def nested(levels):
        value = {}
        for _ in range(levels // len(keys)):
            for key in reversed(keys):
                value = [value] if key == 0 else {key: value}
        return value

    closed(nested(MAX_DEPTH))
    for levels in (MAX_DEPTH + len(keys), 100_000):
        with pytest.raises(InvalidRequest, match="deeper than 100") as caught:
            closed(nested(levels), param="response_format")
        assert caught.value.param == "response_format"


def test_too_many_properties_are_refused_wherever_they_stand():
    def listed(count):
        return {"properties": {f"p{i}": {} for i in range(count)}}

    half = MAX_PROPERTIES // 2
    closed(listed(MAX_PROPERTIES))
    closed({"anyOf": [listed(half), {"items": listed(half)}]})
    for schema in (
        listed(MAX_PROPERTIES + 1),
        {"anyOf": [listed(half), {"items": listed(half + 1)}]},
    ):
        with pytest.raises(InvalidRequest, match="more than 1000") as caught:
            closed(schema, param="response_format")
        assert caught.value.param == "response_format"


def test_strings_of_any_length_are_bounded_and_others_kept():
    schema = {
        "type": "object",
        "properties": {
            "free": {"type": "string"},
            "maybe": {"type": ["string", "null"]},
            "short": {"type": "string", "maxLength": 3},
            "date": {"type": "string", "format": "date"},
            "choice": {"type": "string", "enum": ["type"]},
            "list": {"type": "array", "items": {"type": "string"}},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "type": {"const": {"type": "string"}},
        },
    }
    changed = bounded(schema, 9)["properties"]
    assert changed["free"] == {"type": "string", "maxLength": 9}
    assert changed["maybe"]["maxLength"] == 9
    assert changed["list"]["items"]["maxLength"] == 9
    assert changed["either"]["anyOf"] == [{"type": "string", "maxLength": 9}, {"type": "integer"}]
    for name in ("short", "date", "choice", "type"):
        assert changed[name] == schema["properties"][name]
    assert "maxLength" not in schema["properties"]["free"]
