"""`TrainingText`: what one training learns: conversations, and the target's features of them.

Every part continues where it stopped. `run.py` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tokenleap.core.params import SamplingParams
from tokenleap.errors import ConfigError
from tokenleap.llm import LLM
from tokenleap.training.collect import Chooser, FileSource, SelfSource, Source, collect
from tokenleap.training.conversations import Conversation
from tokenleap.training.diversity import Unseen, diversity, texts_in
from tokenleap.training.feature_passes import compute_features
from tokenleap.training.features import bytes_per_token
from tokenleap.training.folder import TrainingFolder
from tokenleap.training.method import TrainingMethod
from tokenleap.training.pairs import PairData, PairSource
from tokenleap.training.prompt_data import FileData
from tokenleap.training.report import Reporter
from tokenleap.training.settings import DataSettings

__all__ = ["TrainingText"]


class TrainingText:
    """The conversations of one training.

    Args:
        llm: the target, which writes the answers.
        method: the kind of drafter.
        data: what is learnt.
        max_length: most tokens of a conversation.
        rows: sequences that the target writes at a time.
        folder: of the training.
        reporter: shows how it goes.

    Raises:
        ConfigError: the data do not suit the target or the method.
        CompatibilityError: the target has no chat template, and there is no data.
        DataError: a file is malformed.
    """

    def __init__(
        self,
        llm: LLM,
        method: TrainingMethod,
        data: DataSettings,
        max_length: int,
        rows: int,
        folder: TrainingFolder,
        reporter: Reporter,
    ) -> None:
        self._llm, self._method, self._data = llm, method, data
        self._max_length, self._rows = max_length, rows
        self._folder, self._reporter = folder, reporter
        self._source = self._made_source()

    def _made_source(self) -> Source:
        given = self._method.learns_given_answers
        if self._llm.engine.target.reads_source:
            return self._pairs(given)
        if self._data.parallel:
            raise ConfigError("--source and --target are for encoder-decoders: give --data.")
        length = self._max_length
        if not self._data.files:
            if given:
                raise ConfigError("answers: 'fixed' learns those in your files: give --data FILE.")
            return SelfSource(self._llm, self._rows, length)
        found = FileData(self._llm, self._data.files, length, given_answers=given)
        if found.too_long:
            self._reporter.say(f"{found.too_long} prompts are too long, and are left out.")
        return FileSource(self._llm, found, self._rows)

    def _pairs(self, given: bool) -> PairSource:
        """The sources of an encoder-decoder, which it answers."""
        if not (self._data.files or self._data.parallel):
            raise ConfigError(
                "an encoder-decoder cannot write sources by itself: give --data FILE, or --source."
            )
        found = PairData(self._llm, self._data)
        if found.left_out:
            self._reporter.say(f"{found.left_out} sources are left out. {found.reason}")
        params = SamplingParams(
            temperature=0,
            max_tokens=self._max_length,
            beam_width=self._method.beam_width,
        )
        return PairSource(self._llm, found, self._rows, params, given_answers=given)

    def conversations(
        self, name: str, tokens: int, others: Sequence[Conversation] = ()
    ) -> list[Conversation]:
        """Conversations that are there, and new ones until there are enough.

        Args:
            name: `train` or `held_out`.
            tokens: of answers.
            others: conversations whose prompts must not be used again.
        """
        path, held_out = self._folder.conversations(name), name == "held_out"
        path.parent.mkdir(parents=True, exist_ok=True)
        what = "Held-out conversations" if held_out else "Conversations"
        chooser = Chooser(tokens, self._unseen, others)
        with self._reporter.stage(what, tokens) as done:
            for total in collect(self._source, path, chooser, held_out=held_out):
                done(min(total, tokens), f"{total:,} tokens of answers")
        found = diversity(chooser.kept)
        self._reporter.say(
            f"{what}: {found.conversations:,} with {found.answer_tokens:,} tokens of answers, "
            f"{found.prompt_tokens:.0f} tokens in front of an answer, {found.turns:.2f} turns, "
            f"{found.greedy:.0%} greedy; distinct 1-, 2- and 3-grams "
            f"{', '.join(f'{share:.1%}' for share in found.distinct)}; left out: {chooser.twice} "
            f"twice, {chooser.overlapping} for prompts that must stay unseen."
        )
        return chooser.kept

    @cached_property
    def _unseen(self) -> Unseen:
        if not self._data.unseen:
            return Unseen(())
        assert self._llm.tokenizer is not None
        texts = [text for path in self._data.unseen for text in texts_in(path)]
        encode = self._llm.tokenizer.encode
        return Unseen(encode(text, add_special_tokens=False) for text in texts)

    def compute_features(
        self, name: str, conversations: Sequence[Conversation], layers: Sequence[int]
    ) -> None:
        """Run the target over conversations; complete features stay as they are.

        Args:
            name: `train` or `held_out`.
            conversations: these.
            layers: ids of the layers whose hidden states are kept.
        """
        target, total = self._llm.engine.target, sum(len(c.tokens) for c in conversations)
        encoder = self._method.reads_encoder
        size = total * bytes_per_token(len(layers), target.hidden_size, encoder=encoder)
        doing = f"Features ({size / 1e9:.2f} GB)"
        folder = self._folder.features(name)
        with self._reporter.stage(doing, total) as done:
            for count in compute_features(target, conversations, layers, folder, encoder=encoder):
                done(count, f"{count:,} tokens")
