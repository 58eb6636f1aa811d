"""The CPU runtime in C++, compiled on the user's machine at its first use.

It runs the Llama family and encoder-decoders.
"""
