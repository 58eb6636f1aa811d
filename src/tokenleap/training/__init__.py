"""Training of drafters for one target: `tokenleap train`.

A training goes through the files in this order:

    run.py            one training from beginning to end, in one folder (folder.py)
    estimate.py       hours, disk and memory (memory.py), measured beforehand
    collect.py        conversations, kept in files (conversations.py): the target writes them by
                      itself (self_data.py, openings.py), or answers the user's prompts
                      (prompt_data.py); talks.py has the answers, diversity.py what they are like
    features.py       what training needs of the target's passes, computed once
    batches.py        what is to be learnt from them; draft_vocabulary.py chooses its tokens
    series.py         the drafters of a method, one after the other
    trainer.py        the loop (settings.py, optimizers.py, checkpoints.py), what it tells
                      (progress.py, curves.py), and what it measures (acceptance.py); in rounds
                      (rounds.py) if the drafter writes some of the text itself (on_policy.py)
    methods.py        the kinds of drafters: each has a file that makes one (method.py) and says
                      what it learns (trainee.py, losses.py)
    serving.py        what the drafter brings in the engine; new_target.py compares a target that
                      was trained, too (tuned.py), with the one it was made of
    report.py         what the user is told, on the way and at the end

Drafters that learn while they serve have a learner instead (`online.py`), with what it learns from
(`replay.py`) and when (`pace.py`); the engine calls it.

`processes.py` joins the processes of `accelerate launch`, and `choices.py` has the names of the
methods for help pages.
"""
