"""Training of drafters for one target: `tokenleap train`.

A training goes through the files in this order:

    run.py              one training from beginning to end, and its folder
    collect.py          the conversations, kept in files: the target writes them by itself or
                        answers the user's prompts; conversations.py writes them
    features.py         what training needs of the target's passes, computed once, and batches of it
    method.py           the registry of methods, with settings; each has its network and loss in
                        eagle.py, state_heads.py, distill.py, tuned.py or spec_drafter.py
    trainee.py          a network with its loss
    trainer.py          the loop, its optimizers, checkpoints, and what it measures
    report.py           what a training takes, how it goes, and what the drafter brings

Drafters that learn while they serve have a learner instead (`online.py`); the engine calls it.
"""
