"""`DrafterSpec`: how a method is made, from `DrafterParts`. Other packages declare theirs, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tokenleap.core.grammar import Grammars
    from tokenleap.drafters.base import Drafter, DrafterOptions
    from tokenleap.drafters.vocabulary import DraftModel
    from tokenleap.runtime.passes import Rows
    from tokenleap.runtime.target import Target


@dataclass(frozen=True)
class DrafterParts:
    """Everything that `DrafterSpec.build` may use to construct a drafter.

    Args:
        options: the method's own options.
        coupled: whether the acceptance rule wants drafts drawn with the target's own noise.
        shares_nodes: whether it wants draws of one token below the same path to share a node
            (`Draft.draws`); a drafter without equal draws ignores it.
        target: the target, for methods that draft with a part of it.
        model: what the user gave as `model`; a folder for methods with `takes_head`.
        share_memory: counts KV rows of the drafter into `kv_cache_memory`.
        load_model: loads the draft model, with any vocabulary; only for methods with
            `takes_model`.
        build: constructs another drafter, for methods that combine several. Its arguments are the
            configuration, the model it drafts for, and whether that model's rule couples.
        tokenizer: the target's tokenizer, or None if it has none.
        grammars: compiles structured outputs for the target's tokens.
    """

    options: Any
    coupled: bool
    shares_nodes: bool
    target: Target
    model: Any
    share_memory: Callable[[Rows], None]
    load_model: Callable[[], DraftModel]
    build: Callable[[Mapping[str, Any], Target, bool], Drafter]
    tokenizer: PreTrainedTokenizerBase | None
    grammars: Grammars


@dataclass(frozen=True)
class DrafterSpec:
    """One method: its options, its constructor and its defaults.

    Args:
        options: the class of the method's own options.
        build: constructs the drafter.
        default_num_speculative_tokens: the default draft length, in drafted nodes.
        takes_model: whether the method needs a draft model (`model`).
        takes_head: whether the method needs the folder of a trained head (`model`).
        needs_source: whether the method drafts for encoder-decoders only.
        reads_no_source: whether it drafts for decoder-only models only.
        steady: whether the method reads its next draft from the target's output at the nodes of
            its last one. A skipped or shortened draft then makes the next one worse, too. So the
            default controller is `fixed`.
        summary: one line for `tokenleap` help texts.
    """

    options: type[DrafterOptions]
    build: Callable[[DrafterParts], Drafter]
    default_num_speculative_tokens: int
    takes_model: bool = False
    takes_head: bool = False
    needs_source: bool = False
    reads_no_source: bool = False
    steady: bool = False
    summary: str = ""
