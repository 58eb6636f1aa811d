"""Two published encoder-decoders from PyPI, converted: speed of drafts, on tasks that they can do.

The wheels are `detransliterator` 0.0.2 (Latin to N'Ko: two Transformers with one vocabulary, a
target and a draft model) and `ruaccent-predictor` 1.2.0 (Russian stress marks: the output copies
the input). Get them with `pip download --no-deps`, unpack them into one folder, and name it.

    python -m benchmarks.public_seq2seq nko --wheels FOLDER
    python -m benchmarks.public_seq2seq stress --wheels FOLDER

Every round runs all configurations, one after the other. Figures are medians over rounds of the
ratio to plain greedy decoding in the same round. Tokens are compared, and the stress model's logits
with those of the package's own network.
"""

# ruff: noqa: RUF001 - Russian sentences

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.converted import (
    converted_fairseq,
    converted_stress,
    fairseq_words,
    joint_vocabulary,
)
from benchmarks.report import command_line, in_one_line, machine, markdown_table, one_line_errors
from tokenleap import LLM, SamplingParams

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Wheels = Annotated[Path, typer.Option(help="Folder with both wheels unpacked.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds that are measured.")]
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
) -> tuple[list[list[str]], list[tuple[int, ...]]]:
    """Rows of the table, and the greedy outputs; sources are read one at a time."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    llms = {
        name: LLM(model, speculative_config=config, enable_prefix_caching=False)
        for name, config in configs.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    outputs: dict[str, list[Any]] = {}
    for _ in range(rounds + 1):  # the first one warms up
        for name, llm in llms.items():
            llm.reset_drafter_memory()
            began = time.perf_counter()
            outputs[name] = [llm.generate(list(source), params)[0] for source in sources]
            seconds[name].append(time.perf_counter() - began)
    plain = [output.token_ids for output in outputs["none"]]
    rows = []
    for name in configs:
        ratios = [a / b for a, b in zip(seconds["none"][1:], seconds[name][1:], strict=True)]
        passes = sum(output.metrics.target_passes for output in outputs[name])
        tokens = sum(map(len, plain))
        same = [output.token_ids for output in outputs[name]] == plain
        low, high = min(ratios), max(ratios)
        rows.append(
            [
                name,
                f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]",
                f"{tokens / passes:.2f}",
                f"{1000 * statistics.median(seconds[name][1:]) / tokens:.2f}",
                str(same),
            ]
        )
    return rows, plain


HEADER = ["method", "speed over greedy", "tokens a pass", "ms a token", "same tokens"]


def show(rows: Sequence[Sequence[str]], *notes: str) -> None:
    """Print a table and what else was found."""
    print(f"{command_line('benchmarks.public_seq2seq')}")
    print(in_one_line(machine(torch.device("cpu"), torch.float32)))
    for note in notes:
        print(note)
    print("\n" + markdown_table(HEADER, rows))


@app.command()
def stress(wheels: Wheels, rounds: Rounds = 5, count: Count = 12, length: int = 24) -> None:
    """Russian stress marks: `copy`, which is input-guided aggressive decoding."""
    with one_line_errors():
        torch.set_num_threads(1)
        package = wheels / "ruaccent"
        vocabulary: dict[str, int] = json.loads((package / "model/vocab.json").read_text("utf-8"))
        model = converted_stress(_weights(package))
        sources = [_characters(text, vocabulary) for text in SENTENCES[:count]]
        rows, outputs = compare(model, drafts(None, length), sources, 200, rounds)
        letters = {number: text for text, number in vocabulary.items()}
        text = "".join(letters[token] for token in outputs[0] if token > 3)
        difference = _stress_difference(package, model, sources[0], outputs[0])
    show(rows, f"first output: {text}", f"largest difference of logits: {difference:.1e}")


def _weights(package: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(
        package / "model/acc_model.pt", map_location="cpu", weights_only=True
    )
    return found


def _characters(text: str, vocabulary: Mapping[str, int]) -> list[int]:
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
    own.load_state_dict(_weights(package))
    own.train(False)
    read, text = torch.tensor([source]), torch.tensor([[1, *output]])
    with torch.inference_mode():
        mask = own.generate_square_subsequent_mask(text.shape[1])
        expected = own(read, text, tgt_mask=mask)
        found = model(input_ids=read, decoder_input_ids=text).logits
    return float((found - expected).abs().max())


@app.command()
def nko(wheels: Wheels, rounds: Rounds = 5, count: Count = 20, out: Path | None = None) -> None:
    """Latin to N'Ko: a target of 8 + 8 layers, and a draft model of 5 + 5."""
    with one_line_errors():
        torch.set_num_threads(1)
        assets = wheels / "detransliterator/assets"
        data = assets / "latin2nqo_001.38/data"
        place = out or wheels / "converted"
        folders = []
        for name in ("latin2nqo_001.38", "latin2nqo_001.35"):
            folders.append(place / name)
            converted_fairseq(assets / name / "checkpoints/checkpoint_best.pt", folders[-1])
        reads, writes = joint_vocabulary(data / "dict.roman.txt", data / "dict.nqo.txt")
        test = assets / "test_data/diane_parallel_002"
        latin = test.with_suffix(".bam-g").read_text("utf-8").splitlines()
        nqo = test.with_suffix(".nqo").read_text("utf-8").splitlines()
        pairs = [pair for pair in zip(latin, nqo, strict=True) if 40 <= len(pair[0]) <= 160]
        pairs = pairs[:: max(1, len(pairs) // count)][:count]
        codes = data / "bpe.code"
        sources = [
            [*(reads.get(word, 3) for word in fairseq_words(text.lower(), codes)), 2]
            for text, _ in pairs
        ]
        rows, outputs = compare(str(folders[0]), drafts(str(folders[1]), 0), sources, 200, rounds)
        words = {number: word for word, number in writes.items()}
        written = [
            " ".join(words.get(token, "") for token in output if token > 3).replace("@@ ", "")
            for output in outputs
        ]
    show(rows, *_close(written, [text for _, text in pairs]))


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
        f"shared trigrams with the references: {statistics.mean(shared):.2f}",
        f"first output: {written[0]}",
        f"reference:    {wanted[0]}",
    ]


if __name__ == "__main__":
    app()
