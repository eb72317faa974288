"""Linears of packed weights."""
