"""Retrieved documents as messages that a prefix cache can use again.

Put them behind what stays (system message, tools, history), the question last:

    {"messages": passage_messages(retriever.invoke(question), question)}

added to the state of a graph by `add_messages`, whose reducer keeps a passage that is retrieved
again where it already is. A system message that holds the passages instead changes with every
question, and with it the whole prompt.

Some chat templates insist that the roles of user and assistant alternate. For those, join the
messages right before the model, by `langchain_core.messages.merge_message_runs`; the joined
message is one segment, so that an explained miss no longer names the passage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from xml.sax.saxutils import quoteattr

from langchain_core.documents import Document
from langchain_core.messages import HumanMessage

_ALIKE = re.compile(r"<\s*/?\s*passage", re.IGNORECASE)  # whatever a model may take for a tag


def passage_messages(
    documents: Iterable[Document], question: str | None = None
) -> list[HumanMessage]:
    """A message for each passage, in the order of retrieval, and the question as the last one.

    Each passage is a segment of the prompt of its own. Its content and its message id follow from
    its source and text alone: not from its rank, its score, or other metadata. A passage that is
    there twice appears once. The question gets no id.
    """
    contents = dict.fromkeys(_passage(document) for document in documents)
    messages = [HumanMessage(content, id=_message_id(content)) for content in contents]
    return messages if question is None else [*messages, HumanMessage(question)]


def _passage(document: Document) -> str:
    """The text as it is, between tags that it has nothing alike: it cannot end them, or open more.

    As in Markdown's fences, the tags give way to the text, and not the text to the tags. A text
    cannot hold its own hash.
    """
    text = document.page_content
    tag = f"passage-{_hash(text)[:16]}" if _ALIKE.search(text) else "passage"
    return f"<{tag}{_source_attribute(document)}>\n{text}\n</{tag}>"


def _source_attribute(document: Document) -> str:
    """Where the document is from: its source, which outlives a new index, or else its id."""
    source = document.metadata.get("source")
    source = document.id if source is None else source
    return "" if source is None else f" source={quoteattr(str(source))}"


def _message_id(content: str) -> str:
    return f"passage-{_hash(content)[:32]}"


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
