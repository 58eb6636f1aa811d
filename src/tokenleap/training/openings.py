"""How users' messages begin: words for the target to go on from, and places for texts of its own.

A small model that is only given the template mostly asks for the same few things. Most messages
therefore begin with words drawn from these lists, often with a word of the vocabulary as their
topic, and the model writes the rest.

Conversations come in blocks of consecutive seeds. The first of a block ask for articles, stories
and the like. The last ones read what the target answered there: they summarize it, ask about it,
or have it rewritten, as one text or as several documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

__all__ = ["Opening", "authors_of", "first_opening", "next_opening", "reads"]

_BLOCK, _AUTHORS, _READERS = 16, 4, 5

_CHAT_TOKENS, _TEXT_TOKENS, _QUESTION_TOKENS = 160, 448, 48


@dataclass(frozen=True)
class Opening:
    """How a user's message begins.

    Args:
        words: its first words. `{topic}` stands for a word of the vocabulary, `{text}` for text
            that the target wrote in other conversations, and `{documents}` for the same as numbered
            documents.
        most: most tokens that the target adds; 0 if the message is complete.
    """

    words: str = ""
    most: int = _CHAT_TOKENS

    @property
    def reads(self) -> bool:
        """Whether there is text in it that the target wrote elsewhere."""
        return "{text}" in self.words or "{documents}" in self.words


_QUESTIONS = (
    "What is",
    "What is{topic}",
    "What are",
    "What are the main",
    "What was the",
    "What does",
    "What is the difference between",
    "What happens if",
    "Who was",
    "Who wrote",
    "Who is the",
    "Who played",
    "When did",
    "When was the",
    "Where is",
    "Where does the",
    "Why do",
    "Why is",
    "How do I",
    "How does",
    "How does{topic}",
    "How many",
    "How long",
    "How would you",
    "Which of the following",
    "In which year",
    "Is it true that",
    "Can you explain",
    "Could you help me",
    "Could you tell me about{topic}",
    "Do you know",
    "Should I",
    "Tell me about{topic}",
    "Here are some facts about",
    "I am",
    "I have",
    "I need",
    "I want to",
    "My",
    "We are",
    "Hello",
)
_TASKS = (
    "Explain",
    "Explain{topic}",
    "Explain to a child",
    "Describe",
    "Describe{topic}",
    "Discuss",
    "Compare",
    "Compare{topic} and",
    "Give me",
    "List",
    "List ten",
    "Imagine you are",
    "Pretend to be",
    "Act as",
    "You are a",
    "Write a",
    "Write a poem about{topic}",
    "Write an email to",
    "Write a letter about{topic}",
    "Write a Python function that",
    "Write a program in C++ that",
    "Write a script that",
    "Write a SQL query",
    "Implement",
    "Fix the following code:\n\n",
    "Design",
    "Plan",
    "Suggest",
    "Create a table of",
    "Outline",
    "Name",
    "Classify the following",
    "Extract all names from the following text:",
    "Correct the grammar of this sentence:",
    "Rewrite the following sentence",
    "Evaluate the following",
    "Complete the sentence:",
)
_PROBLEMS = (
    "Solve the following equation:",
    "Solve this problem step by step.\n\n",
    "Find the",
    "Find the value of",
    "Calculate",
    "Prove that",
    "Simplify",
    "A train",
    "A farmer has",
    "A store sells",
    "A recipe needs",
    "A class of",
    "A car travels",
    "A box contains",
    "A school",
    "Every day,",
    "In a garden",
    "There are",
    "If a",
    "If it takes",
    "Each{topic} costs $",
    "How much money",
    "John has",
    "Mary bought",
    "Tom is",
    "Anna wants to",
    "Peter and his",
    "Lisa earns $",
    "David reads",
    "Emma bakes",
    "Mr. Smith",
    "Two friends",
)
_TRANSLATE = (
    "Translate this German sentence into English:",
    "Translate the following sentence into English:",
    "Translate this from German into English:",
    "Translate into English:\n\n",
    "What does this mean in English?\n\n",
    "Please translate for me:",
    "Translate into French:",
    "Translate the following text into Spanish:",
)
_GERMAN = (
    *("Der", "Die", "Das", "Ein", "Eine", "Er", "Sie", "Es", "Wir", "Ich", "Man", "Nach", "Mit"),
    *("In der", "Im Jahr", "Auf dem", "Am", "Auch", "Wenn", "Für", "Bei", "Seit", "Zwei", "Viele"),
    *("Der Präsident", "Die Stadt", "Das Unternehmen", "Die Polizei", "Die Menschen", "Am Montag"),
    *("Unsere", "Mein", "Das Hotel", "Die Regierung", "Nicht", "Heute", "Gestern", "Als", "Doch"),
)
_ARTICLES = tuple(
    f"{words}{{topic}}"
    for words in (
        "Write a long article about",
        "Write an article for an encyclopedia about",
        "Write a news report about",
        "Write a newspaper article about",
        "Write a short story about",
        "Write a long story about",
        "Write a dialogue about",
        "Write an interview about",
        "Write an essay about",
        "Write a blog post about",
        "Write the biography of",
        "Write the history of",
        "Write a chapter of a textbook about",
        "Write a review of",
        "Write a guide to",
        "Write a speech about",
        "Write a scientific text about",
        "Tell me everything about",
    )
)
_READINGS = (
    *(
        Opening(words, 0)
        for words in (
            "Summarize:\n\n{text}",
            "Summarize the following article:\n\n{text}",
            "Summarize the following text in three sentences.\n\n{text}",
            "Write a summary of this report.\n\n{text}",
            "{text}\n\nSummarize the text above.",
            "{text}\n\nTL;DR",
            "What are the main points of this text?\n\n{text}",
            "Give this article a headline, and explain your choice.\n\n{text}",
            "Summarize each of these documents.\n\n{documents}",
            "Rewrite this text in simple words:\n\n{text}",
            "Correct the mistakes in this text:\n\n{text}",
            "Continue this text:\n\n{text}",
            "List all names and places in this text.\n\n{text}",
            "Translate into German:\n\n{text}",
        )
    ),
    *(
        Opening(words, _QUESTION_TOKENS)
        for words in (
            "Read the passage and answer the question.\n\nPassage: {text}\n\nQuestion:",
            "{text}\n\nQuestion: What",
            "{text}\n\nAccording to this text,",
            "{text}\n\nWho",
            "{text}\n\nIn the text above,",
            "{text}\n\nRewrite this text",
            "Use the following documents to answer the question.\n\n{documents}\n\nQuestion:",
            "I have some information for you:\n\n{documents}\n\nAnswer this question: what is",
            "I have some information for you:\n\n{documents}\n\nAnswer this question: who",
            "{documents}\n\nAnswer with the documents above: how",
            "{documents}\n\nAnswer with the documents above: when",
            "Here are search results.\n\n{documents}\n\nWith their help, tell me where",
        )
    ),
)
_UNREAD = (
    Opening("Summarize the following article:\n\n", _TEXT_TOKENS),
    Opening("Read the passage and answer the question.\n\nPassage:", _TEXT_TOKENS),
    Opening("Use these documents to answer the question.\n\nDocument 1:", _TEXT_TOKENS),
    Opening("Edit the following text:\n\n", _TEXT_TOKENS),
)
_NEXT = (
    *("", "", "", "Now", "Can you", "Could you", "Why", "What", "What if", "How", "Who", "Where"),
    *("Explain", "Give me an example of", "Rewrite your answer", "Rewrite your answer as a poem"),
    *("Summarize your answer", "Summarize this in one sentence", "Translate your answer into"),
    *("Write the same", "Make it shorter", "Tell me more about", "Are you sure", "I don't"),
    *("Thank you", "In your answer,", "List", "Is there", "Add", "Continue", "And if", "Compare"),
)


def first_opening(seed: int) -> Opening:
    """Of the first message of a conversation.

    Args:
        seed: of the conversation.
    """
    random = Random(f"opening {seed}")
    if reads(seed):
        return random.choice(_READINGS)
    if seed % _BLOCK < _AUTHORS:
        return Opening(random.choice(_ARTICLES), _QUESTION_TOKENS)
    return random.choices(
        (
            Opening(),
            Opening(random.choice(_QUESTIONS)),
            Opening(random.choice(_TASKS)),
            Opening(random.choice(_PROBLEMS)),
            Opening(f"{random.choice(_TRANSLATE)} {random.choice(_GERMAN)}"),
            random.choice(_UNREAD),
        ),
        weights=(6, 5, 4, 4, 3, 1),
    )[0]


def next_opening(seed: int, turn: int) -> Opening:
    """Of a later message.

    Args:
        seed: of the conversation.
        turn: answers before it.
    """
    return Opening(Random(f"opening {seed} {turn}").choice(_NEXT))


def reads(seed: int) -> bool:
    """Whether a conversation begins with text that the target wrote in others of its block."""
    return seed % _BLOCK >= _BLOCK - _READERS


def authors_of(seed: int) -> range:
    """The seeds of the conversations that give such texts to this one."""
    start = seed - seed % _BLOCK
    return range(start, start + _AUTHORS)
