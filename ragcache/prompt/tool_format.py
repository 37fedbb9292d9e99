"""How models write tool calls: what the grammar allows and what the parser reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The exact text around the calls of one output.

    begin, then for each call `head` NAME `middle` ARGUMENTS `tail`, with `separator` between two
    of them, then end. NAME is JSON-escaped text without quotes, ARGUMENTS a JSON object.
    `separator` None: this model makes one call at a time.
    """

    head: str
    middle: str
    tail: str
    begin: str = ""
    separator: str | None = None
    end: str = ""

    @property
    def trigger(self) -> str:
        """What free text must not contain, or a call begins: the opening up to the first name."""
        return self.begin + self.head


HERMES = CallSyntax(
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"
)
SMOLLM2 = CallSyntax(
    '{"name": "',
    '", "arguments": ',
    "}",
    begin="<tool_call>[",
    separator=", ",
    end="]</tool_call>",
)
LLAMA3 = CallSyntax('{"name": "', '", "parameters": ', "}")
