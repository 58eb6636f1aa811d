"""The mathematics of speculative decoding: token trees, distributions, sampling, acceptance.

`tree` and `distribution` hold the data that everything else exchanges. `sampler` turns logits into
the target's distributions p, under `params` and an optional `grammar`. `noise` supplies the random
numbers, and `acceptance` decides which drafted tokens are kept. `detokenizer`, `config` and `files`
are small tools that all layers use. Nothing here loads or runs a model, so a test can enumerate
every case.
"""
