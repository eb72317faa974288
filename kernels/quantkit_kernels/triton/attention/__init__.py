"""Attention over pages, and of prompts."""
