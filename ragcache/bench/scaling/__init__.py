"""`ragcache bench scaling`: how the cost of a token grows with context, batch and new tokens."""
