"""Why a prompt hit as far as it did, as JSON."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ragcache.types import Explanation


def extension(explanation: Explanation | None, block_size: int) -> dict[str, Any]:
    """The field `ragcache` of an answer, null with prefix caching off."""
    return {"ragcache": explanation and explanation_body(explanation, block_size)}


def explanation_body(explanation: Explanation, block_size: int) -> dict[str, Any]:
    """The fields of `Explanation`, and the tokens of a block: nothing smaller is ever shared."""
    body = {field.name: getattr(explanation, field.name) for field in fields(explanation)}
    reason = explanation.reason and explanation.reason.value
    return {**body, "reason": reason, "block_size": block_size}
