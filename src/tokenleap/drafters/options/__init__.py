"""The options of all methods, apart from what drafts.

They are checked, and listed by `tokenleap methods`, without PyTorch: no module here imports it. A
method's own file imports its options from here. What they derive from is in `base.py`,
`sampled.py` and `tree_options.py`.
"""
