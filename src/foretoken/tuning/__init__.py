"""Search for the best settings of a method on a given model and machine.

`sequoia` and `measure_tree` find the best token tree, for `foretoken tree`. `tune_layers`,
`skip_sets` and `layer_laboratory` find the sublayers that `layer_skip` should skip, for
`foretoken tune-layers`.
"""
