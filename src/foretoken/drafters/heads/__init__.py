"""Drafting heads: small networks trained for one target, which read its hidden states.

`eagle.py` is the drafter. `eagle_net.py` is its network in PyTorch, `eagle_weights.py` and
`fusion.py` are the same for the networks of `runtime/`, and `checkpoint.py` reads and writes its
folders.
"""
