"""Two published encoder-decoders from PyPI, converted: speed of drafts, on tasks that they can do.

The wheels are `detransliterator` 0.0.2 (Latin to N'Ko: two Transformers with one vocabulary, a
target and a draft model) and `ruaccent-predictor` 1.2.0 (Russian stress marks: the output copies
the input). Get them with `pip download --no-deps`, unpack them into one folder, and name it.

    python -m benchmarks.public_seq2seq nko --wheels FOLDER
    python -m benchmarks.public_seq2seq stress --wheels FOLDER

All configurations take turns in every round. A figure is the ratio to plain greedy decoding in the
same round, with a 95 % interval over rounds. Tokens are compared, and the stress model's logits
with those of the package's own network.
"""

# ruff: noqa: RUF001 - Russian sentences

from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
)

from benchmarks import harness
from benchmarks.harness import flat, in_turn, machine, one_line_errors, speeds_over, table, timed
from tokenleap import LLM, RequestOutput, SamplingParams

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Wheels = Annotated[Path, typer.Option(help="Folder with both wheels unpacked.")]
Count = Annotated[int, typer.Option(min=1, help="Sources.")]

SENTENCES = (
    "Утром мы вышли из дома и пошли по узкой дороге к старой мельнице за рекой.",
    "Она долго смотрела в окно, где медленно падал первый снег этой зимы.",
    "Вечером вся семья собралась за большим столом, и дедушка начал рассказывать о море.",
    "На рынке продавали яблоки, груши, мёд и свежий хлеб из соседней деревни.",
    "Учитель открыл книгу на последней странице и попросил детей читать вслух.",
    "Поезд опоздал на два часа, поэтому пассажиры сидели на вокзале и пили горячий чай.",
    "Мой брат купил новую машину, но пока боится ездить на ней по городу.",
    "В лесу было тихо, только ветер качал верхушки деревьев и шумела вода.",
    "Художник нарисовал портрет своей матери и повесил его над камином.",
    "Кошка спала на подоконнике, а собака ждала хозяина у двери.",
    "Студенты готовились к экзамену всю ночь и утром пришли очень усталые.",
    "Весной река поднялась так высоко, что залила луга и нижнюю улицу.",
)


def drafts(model: str | None, length: int) -> dict[str, dict[str, Any]]:
    """Contestants: label -> speculative_config."""
    found: dict[str, dict[str, Any]] = {"none": {"method": "none"}, "suffix": {"method": "suffix"}}
    if model is None:
        for name, controller in (("copy", None), ("copy, fixed", "fixed")):
            config = {"method": "copy", "copy_insertions": True, "num_speculative_tokens": length}
            found[name] = config | ({"controller": controller} if controller else {})
        found["copy, no insertions"] = {"method": "copy", "num_speculative_tokens": length}
    else:
        for count in (3, 5, 8):
            config = {"method": "draft_model", "model": model, "num_speculative_tokens": count}
            found[f"draft_model {count}"] = {**config, "controller": "fixed"}
        found["draft_model, default"] = {**config, "num_speculative_tokens": 8}
    return found


def compare(
    model: Any,
    configs: Mapping[str, dict[str, Any]],
    sources: Sequence[Sequence[int]],
    max_tokens: int,
    rounds: int,
) -> tuple[str, list[tuple[int, ...]]]:
    """The table, and the greedy outputs; sources are read one at a time."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    llms = {
        name: LLM(model, speculative_config=config, enable_prefix_caching=False)
        for name, config in configs.items()
    }

    def run(name: str, sources: Sequence[Sequence[int]]) -> tuple[float, list[RequestOutput]]:
        llm = llms[name]
        llm.reset_drafter_memory()
        return timed(lambda: [llm.generate(list(source), params)[0] for source in sources])

    found = flat(in_turn(list(llms), [sources], rounds, run, warm_up=1, doing="rounds"))
    seconds = {name: [taken for taken, _ in runs] for name, runs in found.items()}
    outputs = {name: runs[-1][1] for name, runs in found.items()}
    texts = {name: [output.token_ids for output in each] for name, each in outputs.items()}
    passes = {
        name: sum(output.metrics.target_passes for output in each) for name, each in outputs.items()
    }
    plain, tokens = texts["none"], sum(map(len, texts["none"]))
    speeds = speeds_over("none", seconds)
    shown = table(
        list(llms),
        {
            "method": str,
            "speed over greedy": lambda name: speeds[name],
            "tokens a pass": lambda name: f"{tokens / passes[name]:.2f}",
            "ms a token": lambda name: f"{1000 * median(seconds[name]) / tokens:.2f}",
            "same tokens": lambda name: texts[name] == plain,
        },
    )
    return shown, plain


def show(found: str, *notes: str) -> None:
    facts = machine("cpu", torch.float32)
    print(harness.report("public_seq2seq", facts, "\n".join(notes), found))


@app.command()
@one_line_errors()
def stress(wheels: Wheels, rounds: harness.Rounds = 5, count: Count = 12, length: int = 24) -> None:
    """Russian stress marks: `copy`, which is input-guided aggressive decoding."""
    torch.set_num_threads(1)
    package, vocabulary = wheels / "ruaccent", stress_vocabulary(wheels)
    model = converted_stress(stress_weights(wheels))
    sources = [stress_source(text, vocabulary) for text in SENTENCES[:count]]
    found, outputs = compare(model, drafts(None, length), sources, 200, rounds)
    letters = {number: text for text, number in vocabulary.items()}
    text = "".join(letters[token] for token in outputs[0] if token > 3)
    difference = _stress_difference(package, model, sources[0], outputs[0])
    show(found, f"first output: {text}", f"largest difference of logits: {difference:.1e}")


def stress_weights(wheels: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(
        wheels / "ruaccent/model/acc_model.pt", map_location="cpu", weights_only=True
    )
    return found


def stress_vocabulary(wheels: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((wheels / "ruaccent/model/vocab.json").read_text("utf-8"))
    return found


def stress_source(text: str, vocabulary: Mapping[str, int]) -> list[int]:
    """As the package reads a text: with padding up to 256, which its encoder sees."""
    ids = [1, *(vocabulary.get(character, 3) for character in text[:254]), 2]
    return ids + [0] * (256 - len(ids))


def _stress_difference(
    package: Path, model: Any, source: Sequence[int], output: Sequence[int]
) -> float:
    """Of the logits of the package's own network and of ours, along an output."""
    spec = importlib.util.spec_from_file_location("ruaccent_accentor", package / "accentor.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = module.StressAccentTransformer(224)
    own.load_state_dict(stress_weights(package.parent))
    own.train(False)
    read, text = torch.tensor([source]), torch.tensor([[1, *output]])
    with torch.inference_mode():
        mask = own.generate_square_subsequent_mask(text.shape[1])
        expected = own(read, text, tgt_mask=mask)
        found = model(input_ids=read, decoder_input_ids=text).logits
    return float((found - expected).abs().max())


@app.command()
@one_line_errors()
def nko(
    wheels: Wheels, rounds: harness.Rounds = 5, count: Count = 20, out: Path | None = None
) -> None:
    """Latin to N'Ko: a target of 8 + 8 layers, and a draft model of 5 + 5."""
    torch.set_num_threads(1)
    folders = nko_models(wheels, out)
    assets = wheels / "detransliterator/assets"
    _, writes = _nko_vocabulary(wheels)
    nqo = (assets / "test_data/diane_parallel_002.nqo").read_text("utf-8").splitlines()
    pairs = [pair for pair in zip(nko_lines(wheels), nqo, strict=True) if 40 <= len(pair[0]) <= 160]
    pairs = pairs[:: max(1, len(pairs) // count)][:count]
    sources = nko_sources(wheels, [text for text, _ in pairs])
    found, outputs = compare(str(folders[0]), drafts(str(folders[1]), 0), sources, 200, rounds)
    words = {number: word for word, number in writes.items()}
    written = [
        " ".join(words.get(token, "") for token in output if token > 3).replace("@@ ", "")
        for output in outputs
    ]
    show(found, *_close(written, [text for _, text in pairs]))


def nko_models(wheels: Path, out: Path | None = None) -> list[Path]:
    """The folders of the target and of the draft model."""
    folders = []
    for name in ("latin2nqo_001.38", "latin2nqo_001.35"):
        folders.append(folder := (out or wheels / "converted") / name)
        checkpoint = f"detransliterator/assets/{name}/checkpoints/checkpoint_best.pt"
        converted_fairseq(wheels / checkpoint, folder)
    return folders


def nko_lines(wheels: Path) -> list[str]:
    """Texts in Latin."""
    path = wheels / "detransliterator/assets/test_data/diane_parallel_002.bam-g"
    return path.read_text("utf-8").splitlines()


def nko_sources(wheels: Path, texts: Sequence[str]) -> list[list[int]]:
    reads, _ = _nko_vocabulary(wheels)
    codes = wheels / _NKO_DATA / "bpe.code"
    words = [fairseq_words(text.lower(), codes) for text in texts]
    return [[*(reads.get(word, UNKNOWN) for word in each), EOS] for each in words]


def _nko_vocabulary(wheels: Path) -> tuple[dict[str, int], dict[str, int]]:
    data = wheels / _NKO_DATA
    return joint_vocabulary(data / "dict.roman.txt", data / "dict.nqo.txt")


_NKO_DATA = "detransliterator/assets/latin2nqo_001.38/data"


def _close(written: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """How close the outputs are to the references, by shared character trigrams."""

    def grams(text: str) -> set[str]:
        letters = [c for c in text if not c.isspace() and c.isalpha()]
        return {"".join(letters[i : i + 3]) for i in range(len(letters) - 2)}

    shared = [
        2 * len(grams(a) & grams(b)) / max(1, len(grams(a)) + len(grams(b)))
        for a, b in zip(written, wanted, strict=True)
    ]
    return [
        f"shared trigrams with the references: {fmean(shared):.2f}",
        f"first output: {written[0]}",
        f"reference:    {wanted[0]}",
    ]


# Checkpoints of fairseq and of `nn.Transformer`, as Transformers models
#
# fairseq pickles its options with the weights. The unpickler makes stubs of every class that is not
# PyTorch's or from `collections`, so fairseq is not needed. Read only files that you trust: this is
# no protection.

BOS, PAD, EOS, UNKNOWN = 0, 1, 2, 3
"""fairseq's special tokens."""
_SPECIAL: dict[str, Any] = {
    "bos_token_id": BOS,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "decoder_start_token_id": EOS,
}
_USUAL: dict[str, Any] = {
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "activation_function": "relu",
    "scale_embedding": True,
    "tie_word_embeddings": False,
}


class _Stub:
    """Placeholder for an object of an unknown class."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("torch", "collections"):
            return super().find_class(module, name)
        return type(name, (_Stub,), {})


_PICKLE = SimpleNamespace(
    __name__="stubs",
    Unpickler=_Unpickler,
    load=lambda file, **options: _Unpickler(file, **options).load(),
)


def joint_vocabulary(source: Path, target: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Word -> id of sources and of outputs, from fairseq's two dictionaries.

    The converted model has one embedding: ids of outputs come first, those of sources after them.
    The special tokens are those of the outputs.
    """
    reads, writes = (
        [line.rsplit(" ", 1)[0] for line in path.read_text("utf-8").splitlines() if line]
        for path in (source, target)
    )
    width = _padded(len(writes) + 4)
    return (
        {word: width + 4 + index for index, word in enumerate(reads)},
        {word: 4 + index for index, word in enumerate(writes)},
    )


def _padded(count: int) -> int:
    """Fairseq pads vocabularies to a multiple of 8."""
    return -(-count // 8) * 8


def converted_fairseq(checkpoint: Path, folder: Path) -> None:
    """Write a pre-norm fairseq Transformer with sinusoidal positions as an M2M100 folder.

    The two embeddings become one table. Output rows of source tokens are zero, and these tokens are
    suppressed. Sources end with EOS, with which the decoder starts, too.
    """
    loaded: Any = torch.load(
        checkpoint, map_location="cpu", pickle_module=_PICKLE, weights_only=False
    )
    weights: dict[str, Tensor] = loaded["model"]
    encoder, decoder = (weights[f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder"))
    layers = {
        side: 1 + max(int(n.split(".")[2]) for n in weights if n.startswith(f"{side}.layers."))
        for side in ("encoder", "decoder")
    }
    size, width = len(encoder) + len(decoder), encoder.shape[1]
    config = M2M100Config(
        vocab_size=size,
        d_model=width,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_ffn_dim=len(weights["encoder.layers.0.fc1.weight"]),
        decoder_ffn_dim=len(weights["decoder.layers.0.fc1.weight"]),
        max_position_embeddings=1024,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        **_SPECIAL,
        **_USUAL,
    )
    model: Any = M2M100ForConditionalGeneration(config)
    table = torch.cat([decoder, encoder])
    own = model.state_dict()
    shared = {f"model.{name}": weight for name, weight in weights.items() if f"model.{name}" in own}
    # Sources have special tokens of their own, whose rows the encoder's table keeps.
    read = table.clone()
    read[: UNKNOWN + 1] = encoder[: UNKNOWN + 1]
    shared["model.encoder.embed_tokens.weight"] = read
    shared["model.decoder.embed_tokens.weight"] = table
    shared["model.shared.weight"] = table
    head = torch.zeros(size, width)
    head[: len(decoder)] = weights["decoder.output_projection.weight"]
    shared["lm_head.weight"] = head
    missing = model.load_state_dict(shared, strict=False).missing_keys
    assert not missing, missing
    make: Any = GenerationConfig
    suppressed = list(range(len(decoder), size))
    model.generation_config = make(**_SPECIAL, suppress_tokens=suppressed, renormalize_logits=True)
    model.save_pretrained(folder)


def fairseq_words(text: str, codes: Path) -> list[str]:
    """The subwords of subword-nmt's byte-pair encoding: all but a word's last one end with "@@"."""
    lines = codes.read_text("utf-8").splitlines()[1:]
    merges = [(first, second) for first, second in (line.split(" ") for line in lines)]
    letters = [part for letter in sorted(set(text)) for part in (letter, f"{letter}</w>")]
    joined = [part for first, second in merges for part in (first, second, first + second)]
    numbers = {part: number for number, part in enumerate(dict.fromkeys([*letters, *joined]))}
    model = BPE(numbers, merges, end_of_word_suffix="</w>")
    found: list[str] = []
    for word in text.split():
        *parts, last = (token.value for token in model.tokenize(word))
        found += [*(f"{part}@@" for part in parts), last.removesuffix("</w>")]
    return found


def converted_stress(weights: Mapping[str, Tensor]) -> BartForConditionalGeneration:
    """The stress marker of `ruaccent-predictor` as a BART.

    `nn.Transformer` has a norm after each stack although its layers end with norms. BART has none
    there, so the last layer's norm is both. That is no class of its own, so this model cannot be
    written as a folder.
    """
    embedding = weights["embed.char_embed.weight"]
    positions = weights["embed.pos_encoding"][0]
    model: Any = BartForConditionalGeneration(_stress_config(weights, len(positions)))
    own: dict[str, Tensor] = {
        "model.shared.weight": embedding,
        "lm_head.weight": weights["output_proj.weight"],
        "final_logits_bias": weights["output_proj.bias"][None],
    }
    for side in ("encoder", "decoder"):
        own |= _stress_layers(weights, side)
        unused = torch.zeros(2, embedding.shape[1])
        own[f"model.{side}.embed_positions.weight"] = torch.cat([unused, positions])
        own[f"model.{side}.embed_tokens.weight"] = embedding
    missing, unknown = model.load_state_dict(own, strict=False)
    assert not unknown, unknown
    assert all("layernorm_embedding" in name for name in missing), missing
    for side in ("encoder", "decoder"):
        stack = getattr(model.model, side)
        stack.layernorm_embedding = nn.Identity()
        last = nn.LayerNorm(embedding.shape[1])
        last.load_state_dict(_of(weights, f"transformer.{side}.norm.", ""))
        layer = stack.layers[-1]
        layer.final_layer_norm = nn.Sequential(layer.final_layer_norm, last)
    bart: BartForConditionalGeneration = model.train(False)
    return bart


def _stress_config(weights: Mapping[str, Tensor], positions: int) -> BartConfig:
    size, width = weights["embed.char_embed.weight"].shape
    return BartConfig(
        vocab_size=size,
        d_model=width,
        encoder_layers=4,
        decoder_layers=4,
        encoder_ffn_dim=len(weights["transformer.encoder.layers.0.linear1.weight"]),
        decoder_ffn_dim=len(weights["transformer.decoder.layers.0.linear1.weight"]),
        max_position_embeddings=positions,
        dropout=0.0,
        bos_token_id=1,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        **_USUAL,
    )


def _stress_layers(weights: Mapping[str, Tensor], side: str) -> dict[str, Tensor]:
    own: dict[str, Tensor] = {}
    for layer in range(4):
        theirs, ours = f"transformer.{side}.layers.{layer}.", f"model.{side}.layers.{layer}."
        own |= _attention(weights, f"{theirs}self_attn.", f"{ours}self_attn.")
        names = {"self_attn_layer_norm": "norm1", "final_layer_norm": "norm2"}
        if side == "decoder":
            own |= _attention(weights, f"{theirs}multihead_attn.", f"{ours}encoder_attn.")
            names |= {"encoder_attn_layer_norm": "norm2", "final_layer_norm": "norm3"}
        for name, given in {**names, "fc1": "linear1", "fc2": "linear2"}.items():
            own |= _of(weights, f"{theirs}{given}.", f"{ours}{name}.")
    return own


def _of(weights: Mapping[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    return {f"{ours}{part}": weights[f"{theirs}{part}"] for part in ("weight", "bias")}


def _attention(weights: Mapping[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    """Query, key and value from one matrix."""
    found = _of(weights, f"{theirs}out_proj.", f"{ours}out_proj.")
    for part in ("weight", "bias"):
        thirds = weights[f"{theirs}in_proj_{part}"].chunk(3)
        for name, third in zip("qkv", thirds, strict=True):
            found[f"{ours}{name}_proj.{part}"] = third
    return found


if __name__ == "__main__":
    app()
