"""The contestants of a comparison: Tokenleap's methods, and peers if they are installed.

A contestant is plain data, so that it can be sent to its own process. This file imports neither
torch nor a peer.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenleap.core.extras import how_to_install
from tokenleap.drafters.base import with_method
from tokenleap.errors import ConfigError

if TYPE_CHECKING:
    from tokenleap.models.gguf import GgufFile


OWN = "tokenleap"
"""The kind of Tokenleap's own contestants."""


@dataclass(frozen=True)
class Contestant:
    """One of those compared.

    Args:
        config: the speculative_config of one of the kind `OWN`; empty for a peer.
    """

    label: str
    kind: str
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    quantization: str | None = None


@dataclass(frozen=True)
class Setting:
    """Settings that all contestants share.

    Args:
        draft_model: for methods that take one, and for the assistant of Transformers.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    runtime: str = "auto"
    draft_model: str | None = None
    gguf: str | None = None
    threads: int = 1
    max_tokens: int = 128
    temperature: float = 0.0
    max_prompt_tokens: int = 2048
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    kv_cache_memory: str | None = None

    @property
    def longest(self) -> int:
        """Most tokens of prompt and output together."""
        return self.max_prompt_tokens + self.max_tokens


@dataclass(frozen=True)
class Peer:
    """A peer in one configuration.

    Args:
        samples: whether it is measured at other temperatures than 0, too.
    """

    family: str
    module: str
    needs: tuple[str, ...] = ()
    samples: bool = False


PEERS: dict[str, Peer] = {
    "transformers-plain": Peer("transformers", "transformers", samples=True),
    "transformers-lookup": Peer("transformers", "transformers", samples=True),
    "transformers-assistant": Peer("transformers", "transformers", ("draft_model",), samples=True),
    "llama.cpp-plain": Peer("llama.cpp", "llama_cpp", ("gguf",)),
    "llama.cpp-lookup": Peer("llama.cpp", "llama_cpp", ("gguf",)),
    "openvino-plain": Peer("openvino", "openvino_genai", ("gguf",)),
    "openvino-lookup": Peer("openvino", "openvino_genai", ("gguf",)),
}

BASELINE = Contestant("none", OWN, {"method": "none"})
"""Plain decoding by Tokenleap: all others are compared with it."""


def methods(
    texts: Sequence[str],
    draft_model: str | None,
    quantization: str | None,
    option: str = "--method",
    target: str | None = None,
) -> list[Contestant]:
    """The baseline, and the methods that an option of a command line names.

    Args:
        target: the model's name; `hybrid` takes the head that comes with it.
    """
    baseline = Contestant(BASELINE.label, OWN, BASELINE.config, quantization)
    chosen = [
        _method(f"{option} {text}", text, draft_model, quantization, target) for text in texts
    ]
    return list({one.label: one for one in (baseline, *chosen)}.values())


def _method(
    given: str, text: str, draft_model: str | None, quantization: str | None, target: str | None
) -> Contestant:
    fields: dict[str, Any] = {"method": text}
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{given}: not JSON ({error}).") from None
    fields = dict(with_method(fields))
    if not isinstance(fields.get("method"), str):
        raise ConfigError(f'{given}: give "method", the name of one, or "model".')
    name = fields["method"]
    own = {key: value for key, value in fields.items() if key != "method"}
    quantization = fields.pop("quantization", quantization)
    fields = _complete(fields, draft_model, target)
    return Contestant(f"{name} {json.dumps(own)}" if own else name, OWN, fields, quantization)


def _complete(
    fields: dict[str, Any], draft_model: str | None, target: str | None
) -> dict[str, Any]:
    """The fields with the draft model or the head where the method takes one, checked."""
    from tokenleap.config import SpeculativeConfig
    from tokenleap.drafters.heads.shipped import with_shipped
    from tokenleap.drafters.registry import drafter_spec

    spec = drafter_spec(fields["method"])
    if draft_model is not None and (spec.takes_model or spec.takes_head):
        fields.setdefault("model", draft_model)
    fields = with_shipped(fields, target)
    SpeculativeConfig.parse(fields)
    return fields


def peers(text: str, setting: Setting) -> list[Contestant]:
    """The peers that `--peers` names: families, or one configuration each.

    A family stands for those of its configurations whose needs the setting meets. "none" and an
    empty text name no peer.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    if "none" in names:
        if len(names) > 1:
            raise ConfigError("--peers: 'none' means no peers: leave it out, or the others.")
        return []
    chosen: dict[str, Contestant] = {}
    for name in names:
        for label in _labels(name, setting):
            chosen[label] = Contestant(label, label)
    for label in chosen:
        check_installed(label)
        if setting.temperature and not PEERS[label].samples:
            raise ConfigError(
                f"--temperature: {label} is measured in greedy decoding only: leave it out of "
                "--peers."
            )
    return list(chosen.values())


def _labels(name: str, setting: Setting) -> list[str]:
    families = list(dict.fromkeys(peer.family for peer in PEERS.values()))
    if name not in (*PEERS, *families):
        from tokenleap.core.config import nearest

        known = nearest(name, [*families, *PEERS])
        raise ConfigError(f"--peers: unknown peer '{name}': {known}")
    members = [label for label, peer in PEERS.items() if name in (label, peer.family)]
    ready = [label for label in members if not _missing(PEERS[label], setting)]
    if not ready:
        lacking = _missing(PEERS[members[0]], setting)[0].replace("_", "-")
        raise ConfigError(f"--peers: {name} needs --{lacking}.")
    return ready


def _missing(peer: Peer, setting: Setting) -> list[str]:
    return [name for name in peer.needs if getattr(setting, name) is None]


def check_installed(label: str) -> None:
    """Refuse a peer that is missing, before any work."""
    peer = PEERS[label]
    if importlib.util.find_spec(peer.module) is None:
        raise ConfigError(
            f"{peer.family} is not installed: leave it out of --peers, or {how_to_install('peers')}"
        )


def gguf_path(setting: Setting) -> Path:
    assert setting.gguf is not None, "`peers` has refused it"
    return Path(setting.gguf)


# Checks that the GGUF file for peers has the same model as the other contestants.
#
# It compares what the file's header says: architecture, layers, hidden size and vocabulary. It
# cannot tell two trainings of one architecture apart; their outputs differ, which the table shows.


_ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gpt2", "gemma", "gemma2", "phi3")},
    "mistral": "llama",
    "mixtral": "llama",
    "gpt_neox": "gptneox",
    "phi": "phi2",
    "gemma3_text": "gemma3",
}
"""GGUF's names of Transformers' architectures; for others only sizes are compared."""


def check_same_model(file: Path, folder: Path) -> None:
    from tokenleap.models.gguf import GgufFile

    told = _told(GgufFile.read(file))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    differences = [
        f"{name} {told[name]}, not {value}"
        for name, value in _expected(config).items()
        if value is not None and told[name] != value
    ]
    if differences:
        raise ConfigError(
            f"--gguf: {file} is another model than the one in {folder}: {'; '.join(differences)}."
        )


def _told(file: GgufFile) -> dict[str, Any]:
    rows = [tensor.shape[0] for tensor in file.tensors if tensor.name == "token_embd.weight"]
    return {
        "architecture": file.architecture,
        "layers": file.setting("block_count"),
        "hidden size": file.setting("embedding_length"),
        "vocabulary": rows[0] if rows else len(file.get("tokenizer.ggml.tokens") or ()),
    }


def _expected(config: dict[str, Any]) -> dict[str, Any]:
    """The same facts from a config.json; None is unknown."""
    config = {**config, **config.get("text_config", {})}
    return {
        "architecture": _ARCHITECTURES.get(config.get("model_type", "")),
        "layers": config.get("num_hidden_layers", config.get("n_layer")),
        "hidden size": config.get("hidden_size", config.get("n_embd")),
        "vocabulary": config.get("vocab_size"),
    }


# The interface of a contestant inside its process.


class Runner(Protocol):
    """A loaded contestant. It goes on past an end-of-sequence token.

    Attributes:
        device: where it computes, as torch calls it.
    """

    device: str

    def facts(self) -> dict[str, Any]:
        """Its `version`, `batches` (whether it takes several prompts at once), and bytes."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float = 0.0,
        seeds: Sequence[int] = (),
    ) -> list[dict[str, Any]]:
        """Continue every prompt by `max_tokens` tokens: `token_ids`, times and counts of each."""
        ...

    def forget(self) -> None:
        """Drop what drafters remember of earlier calls, if they do."""
