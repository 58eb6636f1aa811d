"""Forward passes: the target, its KV slab, the networks that compute, and what passes cost."""
