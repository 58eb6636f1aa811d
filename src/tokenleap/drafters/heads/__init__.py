"""Drafting heads: small networks trained for one target, which read its hidden states.

`eagle.py` is the drafter of `eagle`. `eagle_net.py` is EAGLE-3's network in PyTorch,
`eagle_net.py` EAGLE-1's; `eagle.py` and `eagle.py` are the same for the networks of
`runtime/`. `checkpoint.py` and `checkpoint.py` read and write its folders, and `checkpoint.py`
those of its authors. `probe.py` checks whether a head fits the model in use, by a record that
`export.py` can add.

`eagle.py` is the drafter of `parallel`, whose head drafts a block in one pass. `eagle_net.py`
is its network, and `drafters/blocks.py` makes trees of one distribution per level.

Heads without attention share one drafter, `state_head.py`, and one interface, `state_net.py`; each
of `state_net.py`, `state_net.py`, `state_net.py` and `state_net.py` is a network. `state_file.py`
reads and writes their folders, and `state_file.py` reads those of others. `eagle.py` and
`folder.py` are what all drafters and all folders have in common.
"""
