"""OpenAI's API: request bodies in, answers and streams out."""
