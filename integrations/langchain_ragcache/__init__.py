"""LangChain and LangGraph over ragcache: a chat model, middleware, helpers for graphs."""

from langchain_ragcache.chat_models import ChatRagcache
from langchain_ragcache.gateways import shutdown
from langchain_ragcache.passages import passage_messages
from langchain_ragcache.reports import CacheReport, ReportedStep

__all__ = ["CacheReport", "ChatRagcache", "ReportedStep", "passage_messages", "shutdown"]
