"""Sampling parameters of a request, and grammars for structured output."""
