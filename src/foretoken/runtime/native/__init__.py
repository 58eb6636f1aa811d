"""The CPU runtime in C++ for the Llama family, compiled on the user's machine at its first use."""
