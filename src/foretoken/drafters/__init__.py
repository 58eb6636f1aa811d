"""Drafters: what guesses the next tokens. One family a file; `registry.py` names them."""
