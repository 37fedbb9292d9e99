"""One request from messages to text: the only place where prompt meets engine."""

from ragcache.serving.serving import ServedModel, Serving

__all__ = ["ServedModel", "Serving"]
