"""Drafting heads: small networks trained for one target, which read its hidden states.

`eagle.py` is the drafter of `eagle`. `eagle_net.py` is EAGLE-3's network in PyTorch,
`feature_net.py` EAGLE-1's; `eagle_weights.py` and `fusion.py` are the same for the networks of
`runtime/`. `checkpoint.py` and `config_file.py` read and write its folders, and `published.py`
those of its authors. `probe.py` checks whether a head fits the model in use, by a record that
`record.py` can add.

`parallel.py` is the drafter of `parallel`, whose head drafts a block in one pass. `parallel_net.py`
is its network, and `product_tree.py` makes trees of one distribution per level.

Heads without attention share one drafter, `state_head.py`, and one interface, `state_net.py`; each
of `medusa.py`, `hydra.py`, `blockwise.py` and `mlp_speculator.py` is a network. `state_file.py`
reads and writes their folders, and `state_layouts.py` reads those of others. `head_drafter.py` and
`folder.py` are what all drafters and all folders have in common.
"""
