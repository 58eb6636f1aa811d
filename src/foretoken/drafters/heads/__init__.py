"""Drafting heads: small networks trained for one target, which read its hidden states.

`eagle.py` is the drafter of `eagle`. `eagle_net.py` is its network in PyTorch, `eagle_weights.py`
and `fusion.py` are the same for the networks of `runtime/`, and `checkpoint.py` and
`config_file.py` read and write its folders.

Heads without attention share one drafter, `state_head.py`, and one interface, `state_net.py`; each
of `medusa.py`, `hydra.py`, `blockwise.py` and `mlp_speculator.py` is a network. `state_file.py`
reads and writes their folders, and `state_layouts.py` reads those of others. `head_drafter.py` and
`folder.py` are what all drafters and all folders have in common.
"""
