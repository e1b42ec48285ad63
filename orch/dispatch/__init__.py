"""Dispatchers: the balancing algorithms of a stage, one a file, one table."""
