"""Training of drafters for one target: `tokenleap train`.

A training goes through the files in this order:

    run.py            one training from beginning to end: its text, then its drafters
    checkpoints.py    the folder of a training, and the states from which it continues
    estimate.py       hours, disk and memory, measured beforehand
    collect.py        the conversations, kept in files: the target writes them by itself
                      (self_data.py) or answers the user's prompts (prompt_data.py);
                      conversations.py writes them
    features.py       what training needs of the target's passes, computed once
    batches.py        what is to be learnt from them
    trainer.py        the loop, its optimizers, and what it measures (settings.py, progress.py)
    methods.py        the kinds of drafters: each has a file that says what it learns (method.py)
    report.py         what the drafter brings in the engine, and what the user is told

Drafters that learn while they serve have a learner instead (`online.py`); the engine calls it.
"""
