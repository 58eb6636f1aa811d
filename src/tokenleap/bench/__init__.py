"""`tokenleap bench`: compares methods and peers on the same prompts.

Every contestant runs in its own process and computes only while the others wait. What slows the
machine down for a while therefore slows all of them down. A result is a ratio of two contestants
with its confidence interval; tokens per second alone depend on the machine's other work.

    contestants.py   who is compared, the packages that peers need, the interface of a contestant
    own.py, peers.py   contestants: Tokenleap's methods; Transformers, llama.cpp, OpenVINO GenAI
    worker.py        a contestant's process, and the parent's side of it
    prompts_file.py  prompts, and samples of them
    run.py           the rounds in alternating order; every call is a line of the journal
    summary.py       results from calls, with intervals
    report.py        tables as Markdown and HTML, remarks, plots
    machine.py       processor and versions, energy, bytes
"""

from __future__ import annotations
