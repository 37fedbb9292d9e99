"""`python -m ragcache` is the same as the console script."""

from ragcache.cli import main

main()
