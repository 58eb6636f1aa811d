"""Whether a trained head and the model in use belong together, by what they do on a short text.

When a head is trained, its `config.json` records a `Probe`: a text, the target's most probable
token after each of its tokens, and how many of these the head's first level predicts. Other
weights, dtypes and runtimes of the same model agree nearly everywhere (int4: 90 to 100 %). A model
that does not is another one, and the head is refused.

A head that predicts far less than it did reads the wrong layers, or is damaged. The output stays
right, and is slow, so this is a warning, with better layers if there are any. Heads without a
record, which others have made, are judged by a text of ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from pydantic import StringConstraints
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokenleap.core.tree import chain
from tokenleap.drafters.heads.eagle_net import EagleNet, FeatureNet, ParallelNet, default_layers
from tokenleap.drafters.heads.folder import CONFIG, Verifier, validated
from tokenleap.drafters.heads.layouts import EagleFolder
from tokenleap.errors import CompatibilityError, ModelError
from tokenleap.models.chat_template import rendered
from tokenleap.runtime.kv_slab import SlabFull
from tokenleap.runtime.network import Need
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target

LENGTH = 48
"""Most tokens of a text: one pass of the target."""

SAME = 0.7
"""Least share of tokens at which the target and the recorded one agree."""

LOW, GAIN = 0.25, 0.2
"""Without a record: below this share of predicted tokens, other layers are tried. Those that
predict this much more are better; by chance, random heads stay below it."""

MOST = 0.9
"""With a record: layers that predict this part of what was recorded are the right ones, or as
good."""

_TRIED = 16
"""About as many layers are tried in each place."""

_MESSAGES = [
    {"role": "user", "content": "Tell me about the sea."},
    {
        "role": "assistant",
        "content": "The sea is a large body of salt water that covers most of the surface of the "
        "Earth. It is home to many different kinds of fish, plants and other animals.",
    },
]

_Tokens = Annotated[str, StringConstraints(pattern=r"^\d+( \d+)+$")]


@dataclass(frozen=True)
class Probe:
    """The record of a head's target and of its predictions.

    Args:
        follows: the target's most probable token after each of them, in the same form.
        accepted: how many of these the head predicts; None for heads of which it is not known.
    """

    tokens: _Tokens
    follows: _Tokens
    accepted: Annotated[float, Ge(0), Le(1)] | None = None

    @classmethod
    def of(cls, seen: Seen, net: EagleNet | None = None) -> Probe:
        """The record of a head for the target that was looked at."""
        share = None if net is None else round(accepted(net, seen, net.config.aux_layers), 3)
        return cls(_joined(seen.tokens), _joined(seen.follows), share)

    def note(self) -> dict[str, Any]:
        """The entry in `config.json`, among the notes on the training."""
        return {"probe": asdict(self)}


def _joined(tokens: Tensor) -> str:
    return " ".join(map(str, tokens.tolist()))


def _split(tokens: str) -> list[int]:
    return [int(token) for token in tokens.split()]


@dataclass(frozen=True)
class Seen:
    """One pass of a target over a text of n tokens.

    Args:
        tokens: [n].
        follows: [n] the most probable token after each.
        hidden: layer id -> [n, E] hidden states.
    """

    tokens: Tensor
    follows: Tensor
    hidden: Mapping[int, Tensor]


def look(target: Target, tokens: Sequence[int], layers: Iterable[int] = ()) -> Seen:
    need = Need(hidden=tuple(sorted(set(layers))))
    target.add(INTERNAL_KEY)
    try:
        (output,) = target.verify([INTERNAL_KEY], [chain(list(tokens))], need=need)
    finally:
        target.remove(INTERNAL_KEY)
        target.shrink()
    follows = output.scores.float().argmax(-1)
    return Seen(torch.tensor(list(tokens), device=follows.device), follows, output.hidden)


@torch.inference_mode()
def accepted(net: EagleNet, seen: Seen, layers: Sequence[int]) -> float:
    """The share of the target's most probable tokens that the first level of a head predicts."""
    states = net.fuse(torch.stack([seen.hidden[layer] for layer in layers], -2)[None, :-1].float())
    tokens = seen.tokens[None, 1:]
    places = torch.arange(tokens.shape[1], device=tokens.device)
    if isinstance(net, ParallelNet):
        (outputs,) = net.block(tokens, states, places[None], [len(places)])
    else:
        mask = (places <= places[:, None])[None, None]
        outputs, _ = net(tokens, states, places[None], mask)
    drafted = net.draft_tokens[net.logits(outputs)[0].argmax(-1)]
    return float((drafted == seen.follows[1:]).float().mean())


def our_text(tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """The text for heads without a record; empty without a tokenizer."""
    if tokenizer is None:
        return []
    text = " ".join(message["content"] for message in _MESSAGES)
    if tokenizer.chat_template:
        text = rendered(tokenizer, _MESSAGES)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens[-LENGTH:]


def _recorded(folder: Path, notes: Mapping[str, Any], vocab_size: int) -> Probe | None:
    if "probe" not in notes:
        return None
    probe = validated(Probe, notes["probe"], folder / CONFIG)
    tokens, follows = _split(probe.tokens), _split(probe.follows)
    if len(tokens) != len(follows) or max(tokens) >= vocab_size:
        raise ModelError(f"{folder / CONFIG}: probe: its tokens are not those of a text.")
    return probe


def check_target(
    folder: Path, verifier: Verifier, notes: Mapping[str, Any], target: Target
) -> None:
    """Refuse a head that was trained for another model of the same sizes."""
    probe = _recorded(folder, notes, target.vocab_size)
    if probe is not None and (seen := _seen(target, _split(probe.tokens), ())) is not None:
        _compare(folder, verifier, probe, seen)


def _seen(target: Target, tokens: Sequence[int], layers: Iterable[int]) -> Seen | None:
    """See `look`; None if there is no room for the text."""
    if len(tokens) < 2 or len(tokens) >= target.max_model_len:
        return None
    try:
        return look(target, tokens, layers)
    except SlabFull:
        return None


def _compare(folder: Path, verifier: Verifier, probe: Probe, seen: Seen) -> None:
    follows = torch.tensor(_split(probe.follows), device=seen.follows.device)
    same = float((seen.follows == follows).float().mean())
    if same < SAME:
        raise CompatibilityError(
            f"{folder}: this head was trained for {verifier.name_or_path}, and this is another "
            f"model: on a short text, they agree on {same:.0%} of the most probable tokens. Train "
            "one for this model."
        )


def check_head(
    file: EagleFolder,
    net: EagleNet,
    target: Target,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Refuse an EAGLE head for another model; warn if it reads the wrong layers."""
    folder = file.path
    probe = _recorded(folder, file.notes, target.vocab_size)
    tokens = our_text(tokenizer) if probe is None else _split(probe.tokens)
    layers, last = net.config.aux_layers, target.network.num_layers
    if max(layers) > last or (seen := _seen(target, tokens, layers)) is None:
        return  # layers that do not exist are refused for every drafter
    if probe is not None:
        _compare(folder, file.verifier, probe, seen)
    share, least = accepted(net, seen, layers), _least(probe)
    if share >= least:
        return
    reason = _other_layers(net, target, tokens, _enough(share, probe))
    if reason is None and probe is None:
        return  # it may be a bad head
    warnings.warn(
        f"{folder}: with the hidden states of the layers {list(layers)}, this head predicts "
        f"{share:.0%} of the tokens of a short text; {reason or 'its weights may be damaged'}.",
        RuntimeWarning,
        stacklevel=2,
    )


def _enough(share: float, probe: Probe | None) -> float:
    """The share of predicted tokens from which other layers are better than those that it has."""
    recorded = 1.0 if probe is None or probe.accepted is None else probe.accepted
    return min(share + GAIN, MOST * recorded)


def _other_layers(net: EagleNet, target: Target, tokens: Sequence[int], least: float) -> str | None:
    """The advice if a head predicts at least so much with other layers; None if it does not.

    The layers of EAGLE-1 are fixed.
    """
    last = target.network.num_layers
    if isinstance(net, FeatureNet):
        return None
    everything = _seen(target, tokens, range(last + 1))
    assert everything is not None
    best, found = _better(net, everything, net.config.aux_layers, last)
    if found < least:
        return None
    return (
        f"with the layers {list(best)} it would predict {found:.0%}: set "
        f"eagle_aux_hidden_state_layer_ids in its {CONFIG}"
    )


def _least(probe: Probe | None) -> float:
    """Below this share of predicted tokens, something is wrong with a head."""
    return LOW if probe is None or probe.accepted is None else probe.accepted / 2


def _better(
    net: EagleNet, seen: Seen, layers: Sequence[int], last: int
) -> tuple[tuple[int, ...], float]:
    """Layers from which a head predicts most, and how much that is.

    Tries some usual choices, then other layers in each place of the best of them.
    """
    count = len(layers)
    usual = [tuple(layers), tuple(last * (place + 1) // (count + 1) for place in range(count))]
    if len(default_layers(last)) == count:
        usual.append(default_layers(last))
    shifted = [tuple(layer + by for layer in each) for each in usual for by in (-1, 0, 1)]
    shares = {
        each: accepted(net, seen, each)
        for each in shifted
        if all(0 <= layer <= last for layer in each)
    }
    best = max(shares, key=lambda each: shares[each])
    for place in range(count):
        for layer in range(0, last + 1, max(1, last // _TRIED)):
            tried = (*best[:place], layer, *best[place + 1 :])
            if tried not in shares:
                shares[tried] = accepted(net, seen, tried)
        best = max(shares, key=lambda each: shares[each])
    return best, shares[best]
