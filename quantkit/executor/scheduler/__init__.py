"""Continuous batching: sequences, the scheduler, the prefix cache, data-parallel scheduling."""
