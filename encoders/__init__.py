"""Adapters: how to count, split, join and feed the encoders people use. They know nothing of ranks."""
