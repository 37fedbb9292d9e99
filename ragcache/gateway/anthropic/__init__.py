"""Anthropic's API: request bodies in, messages and event streams out."""
