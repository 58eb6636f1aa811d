"""Drafting heads: small networks trained for one target, which read its hidden states.

`eagle.py` serves heads with attention (EAGLE-1 and EAGLE-3, and P-EAGLE, which drafts a block in
one pass); `eagle_net.py` has their networks in PyTorch. `state.py` serves heads without attention
(Medusa, Hydra, blockwise, MLP speculators); `state_net.py` has their networks. `layouts.py` reads
and writes the folders of all heads, with the files and checks of `folder.py`. `probe.py` tells
whether a head fits the model in use.
"""
