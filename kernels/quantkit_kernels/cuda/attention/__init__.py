"""Attention over the paged cache: latent (mla.py), grouped-query (gqa.py), and of prompts
(prefill.py)."""
