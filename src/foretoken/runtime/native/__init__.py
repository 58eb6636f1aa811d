"""The Llama family in C++, compiled on the user's machine at its first use."""
