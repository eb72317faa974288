"""Forward passes of the engine: attention contexts, captured steps, prefill, sampling."""
