"""LangChain and LangGraph over ragcache: a chat model, middleware, helpers for graphs."""

from langchain_ragcache.chat_models import ChatRagcache
from langchain_ragcache.gateways import shutdown

__all__ = ["ChatRagcache", "shutdown"]
