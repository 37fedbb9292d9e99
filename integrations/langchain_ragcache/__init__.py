"""LangChain and LangGraph over ragcache: a chat model, middleware, helpers for graphs."""

from langchain_ragcache.chat_models import ChatRagcache
from langchain_ragcache.gateways import shutdown
from langchain_ragcache.passages import passage_messages
from langchain_ragcache.reports import CacheReport, ReportedStep
from langchain_ragcache.tool_results import in_call_order

__all__ = [
    "CacheReport",
    "ChatRagcache",
    "ReportedStep",
    "in_call_order",
    "passage_messages",
    "shutdown",
]
