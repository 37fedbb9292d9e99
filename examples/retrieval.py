"""What the LangChain examples retrieve with; any of LangChain's retrievers would do."""

from __future__ import annotations

from langchain_core.documents import Document
from library import Library

LIBRARY = Library()


def retrieve(question: str, limit: int) -> list[Document]:
    """The passages that fit a question best, the best one first."""
    passages = LIBRARY.search(question, limit)
    return [Document(passage.text, metadata={"source": passage.title}) for passage in passages]
