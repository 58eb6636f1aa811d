"""The demo's prompts: one with nothing to copy, two whose answers repeat the prompt.

`tokenleap demo` runs them. Commands that measure use them where no file of prompts is given.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PROMPTS", "SENTENCES", "DemoPrompt"]


@dataclass(frozen=True)
class DemoPrompt:
    """A prompt and the kind of task it stands for."""

    title: str
    text: str


_CLASS = """\
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        self.balance = self.balance - amount
        return self.balance
"""

_PASSAGE = (
    "Bread was one of the first foods that people made together. In many villages there was only "
    "one oven, and each family brought its dough there on a fixed day. The baker kept the fire, "
    "told the families when to come, and took a small loaf from each of them as payment. To tell "
    "the loaves apart, every family pressed its own sign into the dough before it was baked. Some "
    "of these signs are still known today, because they were carved into wooden stamps that were "
    "handed down from mother to daughter. When iron stoves became cheap, people began to bake at "
    "home, and most of the village ovens fell out of use."
)

SENTENCES = (
    DemoPrompt("Sentence", "The weather is nice today, so we will walk to the lake."),
    DemoPrompt(
        "Two sentences",
        "The train to the city leaves at nine in the morning. It arrives two hours later.",
    ),
    DemoPrompt("Paragraph", _PASSAGE),
)
"""What an encoder-decoder reads: a translator takes an instruction for a part of the text."""

PROMPTS = (
    DemoPrompt("Question", "What is photosynthesis?"),
    DemoPrompt(
        "Code edit",
        f"Let `withdraw` check the amount. Write out the whole class.\n\n```python\n{_CLASS}```",
    ),
    DemoPrompt("Summary", f"Write a short summary of this passage.\n\n{_PASSAGE}"),
)
