"""`tokenleap bench`: compares methods and peers on the same prompts.

Every contestant runs in its own process and computes only while the others wait. What slows the
machine down for a while therefore slows all of them down. A result is a ratio of two contestants
with its confidence interval; tokens per second alone depend on the machine's other work.

    contestants.py   the contestants, and the packages that peers need
    contestants.py        the interface of a contestant; implemented by own.py (own.py: prompts) and
                     peers.py
    worker.py        a contestant's process; process.py is the parent's side of it
    run.py           the rounds (order: run.py); run.py saves every call
    summary.py       results (rows.py) from calls (rows.py), with intervals (rows.py)
    report.py        Markdown; report.py and report.py: HTML
    machine.py, own.py, machine.py, machine.py   what is measured besides time
"""

from __future__ import annotations
