"""How some users begin: first words of messages that a target completes by itself.

A small model that is only given the template mostly asks for the same few things. Half of the
messages therefore begin with one of these, and the model writes the rest.
"""

from __future__ import annotations

__all__ = ["opening"]

_QUESTIONS = (
    "What is",
    "What are the main",
    "What was the",
    "Who was",
    "Who wrote",
    "When did",
    "Where is",
    "Why do",
    "Why is",
    "How do I",
    "How does",
    "How many",
    "How would you",
    "Which of the following",
    "Is it true that",
    "Can you explain",
    "Could you help me",
    "Explain",
    "Describe",
    "Compare",
    "Give me",
    "List",
    "Tell me about",
    "I am",
    "I have",
    "I want to",
    "My",
    "Imagine you are",
    "Pretend to be",
    "Act as",
)
_TASKS = (
    "Write a",
    "Write a short story about",
    "Write an email to",
    "Write a poem about",
    "Write a Python function that",
    "Write a program in C++ that",
    "Write a blog post about",
    "Implement",
    "Fix the following code:\n\n",
    "Design",
    "Plan",
    "Suggest",
    "Create a table of",
    "Solve the following equation:",
    "Find the",
    "Calculate",
    "Prove that",
    "A train",
    "John has",
    "Mary bought",
    "There are",
    "If a",
    "Classify the following",
    "Extract all names from the following text:",
    "Correct the grammar of this sentence:",
    "Rewrite the following sentence",
    "Translate the following sentence into English:",
    "Translate this from German into English: Die",
    "Translate this from German into English: Wir",
    "Translate into French:",
)
_TEXTS = (
    "Summarize the following article:\n\n",
    "Summarize this text in three sentences:\n\n",
    "Write a summary of the following news report.\n\n",
    "Read the passage and answer the question.\n\nPassage:",
    "Use the following documents to answer the question.\n\nDocument 1:",
    "Here are some facts about",
    "Rewrite this paragraph in simple words:\n\n",
    "Edit the following text:\n\n",
)
_OPENINGS = (*_QUESTIONS, *_TASKS, *_TEXTS)


def opening(seed: int) -> tuple[str, bool]:
    """The first words of a user's message.

    Args:
        seed: of the conversation.

    Returns:
        The words, empty for every second seed; and whether a long text is to follow.
    """
    turn, has_none = divmod(seed // 2, 2)
    if has_none:
        return "", False
    words = _OPENINGS[turn % len(_OPENINGS)]
    return words, words in _TEXTS
