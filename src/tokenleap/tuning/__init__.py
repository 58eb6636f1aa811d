"""Search for the best settings of a method on a given model and machine.

`sequoia` finds the best token tree, for `tokenleap tree`, and `tune_layers` the sublayers that
`layer_skip` should skip, for `tokenleap tune-layers`.
"""
