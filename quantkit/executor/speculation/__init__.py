"""Speculative decoding: drafters, prompt lookup, and the adaptive draft length."""
