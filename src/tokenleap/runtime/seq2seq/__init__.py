"""Encoder-decoders: a decoder over the KV slab that also reads a source (see `network.py`)."""
