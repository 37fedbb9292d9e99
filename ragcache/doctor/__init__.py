"""`ragcache doctor`: what this installation would run, why, and what would make it slow."""
