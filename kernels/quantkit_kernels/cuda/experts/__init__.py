"""Routed experts of packed weights."""
