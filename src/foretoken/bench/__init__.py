"""`foretoken bench`: methods and peers compared on the same prompts, in turn.

Every contestant lives in a process of its own and computes only while the others wait, so that what
slows the machine down for a while slows all of them down. A result is a ratio of two of them with
its confidence interval, never a lone number of tokens per second.

    contestants.py   who takes part; which package a peer comes with
    runner.py        what one offers inside its process; own.py, peers.py: those there are
    worker.py        the process; process.py: the same from outside
    run.py           rounds (rounds.py: their order); journal.py: what they gave, on disk
    summary.py       ratios (ratios.py), agreement; calls.py, rows.py: what it is made of
    report.py        for people, as Markdown; page.py, figures.py: as HTML
    memory.py, roofline.py, energy.py, machine.py   what else can be measured
"""

from __future__ import annotations
