"""KV caches: the paged cache and its block allocator, compressed KV, per-sequence states."""
