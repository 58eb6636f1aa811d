"""`LoadedLLM`: what runs in an `LLM`: model, dtype, device, runtime, and what drafts for it."""

from __future__ import annotations

import torch

from tokenleap.config import SpeculativeConfig
from tokenleap.drafters.online import OnlineReport
from tokenleap.drafters.overlap import VocabularyOverlap
from tokenleap.drafters.vocabulary import DraftModel
from tokenleap.engine.assembly import EngineOptions
from tokenleap.engine.llm_engine import LLMEngine
from tokenleap.models.loaded import LoadedModel

__all__ = ["LoadedLLM"]


class LoadedLLM:
    """The part of `LLM` that says what was loaded; it generates nothing.

    Args:
        loaded: the model and its tokenizer.
        config: how to speculate by default; None takes the head that comes with the package.
        options: limits on memory and batches, and how passes are computed.

    Attributes:
        tokenizer, model_path, speculative_config, eos_token_ids, engine: see `LLM`.
    """

    def __init__(
        self, loaded: LoadedModel, config: SpeculativeConfig | None, options: EngineOptions
    ) -> None:
        self.model_path, self.tokenizer = loaded.path, loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self._name = loaded.title
        self._source = loaded.name if loaded.packed else loaded.path
        self.engine = LLMEngine(loaded, config, options)  # it lets go of the module
        self.speculative_config = self.engine.strategies.config

    def __repr__(self) -> str:
        """What runs, in one line."""
        shown = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": self.engine.target.quantization,
            "device": str(self.device),
            "runtime": self.runtime,
            "tensor_parallel_size": shards if (shards := self.tensor_parallel_size) > 1 else None,
            "method": self.speculative_config.method_name,
        }
        fields = [f"{name}={value!r}" for name, value in shown.items() if value is not None]
        return f"LLM({', '.join([repr(self._name), *fields])})"

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.engine.target.most_tokens

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and KV."""
        return self.engine.target.dtype

    @property
    def runtime(self) -> str:
        """What computes the passes: "native", "lean", "module", "cuda" or "compiled".

        "lean" and "module" use PyTorch's operations; "module" runs the Transformers module. On a
        GPU they are used where passes are not captured in CUDA graphs.
        """
        return self.engine.target.network.name

    @property
    def tensor_parallel_size(self) -> int:
        """Number of processes over which the model's weights are spread."""
        return self.engine.target.peers.size

    @property
    def device(self) -> torch.device:
        """Where the model runs; the device of this process, if there are several."""
        return self.engine.target.device

    @property
    def bit_exact(self) -> bool:
        """Whether a position's bits are the same however many are computed with it (invariant 7).

        It is spot-checked at construction, for this model, dtype and machine. On the native runtime
        the check includes trees. If it is False, the default controller is `fixed`: a controller
        that reads the clock would change the output.
        """
        return self.engine.target.bit_exact

    @property
    def controller(self) -> str:
        """The name of the controller that runs by default.

        If `speculative_config` names none, it is `fixed` where draft lengths may change the output.
        """
        return self.engine.controller

    @property
    def vocabulary_overlap(self) -> VocabularyOverlap | None:
        """How many tokens the draft model shares with the target, and how it drafts for it.

        None without a draft model, or if one of the tokenizers is missing. If there are several
        draft models, it describes the one that was loaded last.
        """
        return self.engine.strategies.vocabulary_overlap

    def as_draft_model(self) -> DraftModel:
        """This model as the draft model of another `LLM`; its weights are in memory once.

        `LLM(other, speculative_config={"model": this})` calls it. The draft model has KV rows of
        its own, and this model's dtype, quantization and runtime.
        """
        return DraftModel(self.engine.lend(), self.tokenizer, self._source)

    @property
    def online_report(self) -> OnlineReport | None:
        """What the drafter has learnt while it served; None without `online`.

        It is that of the `LLM`'s own `speculative_config`.
        """
        return self.engine.online_report
