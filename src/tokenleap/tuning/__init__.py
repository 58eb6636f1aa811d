"""Search for the best settings of a method on a given model and machine.

`sequoia` and `measure_tree` find the best token tree, for `tokenleap tree`. `tune_layers`,
`skip_sets` and `layer_laboratory` find the sublayers that `layer_skip` should skip, for
`tokenleap tune-layers`.
"""
