"""Training of drafters for one target: `foretoken train`.

A training goes through the files in this order:

    run.py            one training from beginning to end, in one folder (folder.py)
    estimate.py       hours and disk, measured beforehand
    collect.py        conversations, kept in files (conversations.py): the target writes them by
                      itself (self_data.py, openings.py), or answers the user's prompts
                      (prompt_data.py); talks.py has the answers, diversity.py what they are like
    features.py       what training needs of the target's passes, computed once
    batches.py        what is to be learnt from them; draft_vocabulary.py chooses its tokens
    trainer.py        the loop (settings.py, optimizers.py, checkpoints.py), what it tells
                      (progress.py, curves.py), and what it measures (acceptance.py)
    methods.py        the kinds of heads: eagle.py and state_heads.py make one (method.py) and say
                      what it learns (trainee.py, losses.py)
    serving.py        what the head brings in the engine
    report.py         what the user is told, on the way and at the end

`processes.py` joins the processes of `accelerate launch`, and `choices.py` has the names of the
methods for help pages.
"""
