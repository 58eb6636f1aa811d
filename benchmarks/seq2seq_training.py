"""Training for `benchmarks.seq2seq`: a small translator as the target, and drafters for it.

The target is a Marian model, trained by Transformers' `Seq2SeqTrainer` as the base models of the
literature are: label smoothing of 0.1, Adam (0.9, 0.98), an inverse square root schedule, batches
by tokens. Passes are in bfloat16, weights and optimizer in float32. Attention is `eager`: in
training with short texts on a CPU, that is faster than PyTorch's fused kernel.

The drafters are trained by `tokenleap train`. All of them learn the same: what the target answers
to the sentences of `data/train`. The first training writes these answers, and the others are given
its files. So is an autoregressive draft model, which is trained as the target is, and begins as its
encoder and two of its decoder layers.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args

import torch
from annotated_types import Ge, Gt, Lt
from pydantic import FiniteFloat
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch.utils.data import DataLoader, Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from benchmarks import BenchmarkError
from benchmarks.seq2seq_data import lines
from tokenleap.core.config import Config
from tokenleap.errors import DataError
from tokenleap.training.conversations import ConversationFile
from tokenleap.training.features import BatchSampler
from tokenleap.training.run import TrainingFolder
from tokenleap.training.spec_drafter import copy_target

_Examples: TypeAlias = "list[dict[str, list[int]]]"

_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
"""Start of the decoder, padding, end, unknown: ids 0 to 3, as in BART."""


class TargetOptions(Config):
    """How large the target is, and how it is trained.

    Args:
        vocab_size: of the joint vocabulary.
        width: d, of embeddings and layers.
        layers: of the encoder, and of the decoder.
        feed_forward: hidden units of a layer.
        heads: of attention.
        max_positions: tokens of the longest source and output.
        dropout: of its layers.
        batch_tokens: padded tokens of a batch, on the longer side.
        learning_rate: the highest.
        warmup_steps: until then it rises.
        save_every: steps from checkpoint to checkpoint.
        averaged: last checkpoints whose mean is the target.
    """

    vocab_size: Annotated[int, Ge(300)] = 8000
    width: Annotated[int, Ge(8)] = 256
    layers: Annotated[int, Ge(1)] = 6
    feed_forward: Annotated[int, Ge(8)] = 1024
    heads: Annotated[int, Ge(1)] = 4
    max_positions: Annotated[int, Ge(16)] = 256
    dropout: Annotated[FiniteFloat, Ge(0), Lt(1)] = 0.1
    batch_tokens: Annotated[int, Ge(16)] = 1024
    learning_rate: Annotated[FiniteFloat, Gt(0)] = 8e-4
    warmup_steps: Annotated[int, Ge(1)] = 800
    save_every: Annotated[int, Ge(1)] = 250
    averaged: Annotated[int, Ge(1)] = 8


def train_vocabulary(
    texts: Sequence[str], size: int, max_positions: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE vocabulary of at most `size` tokens, as a tokenizer of Transformers."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", _SPECIAL.index("</s>"))]
    )
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), _SPECIAL, strict=True))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        **names,
    )


def new_target(options: TargetOptions, vocab_size: int) -> MarianMTModel:
    """A Marian model with random weights."""
    start, pad, end, _unknown = range(len(_SPECIAL))
    config = MarianConfig(
        vocab_size=vocab_size,
        decoder_vocab_size=vocab_size,
        d_model=options.width,
        encoder_layers=options.layers,
        decoder_layers=options.layers,
        encoder_attention_heads=options.heads,
        decoder_attention_heads=options.heads,
        encoder_ffn_dim=options.feed_forward,
        decoder_ffn_dim=options.feed_forward,
        max_position_embeddings=options.max_positions,
        dropout=options.dropout,
        activation_function="relu",
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        bos_token_id=start,
        pad_token_id=pad,
        eos_token_id=end,
        decoder_start_token_id=start,
        forced_eos_token_id=None,
    )
    model = MarianMTModel(config)
    model.generation_config.max_length = options.max_positions
    return model


class _Trainer(Seq2SeqTrainer):
    """With batches by tokens."""

    batches: BatchSampler

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader: DataLoader[Any] = DataLoader(
            cast("Dataset[Any]", self.train_dataset),
            batch_sampler=self.batches,
            collate_fn=self.data_collator,
        )
        prepared: DataLoader[Any] = self.accelerator.prepare(loader)
        return prepared


def train_target(folder: Path, options: TargetOptions, steps: int, seed: int = 0) -> Path:
    """Train until `steps`, from the last checkpoint if there is one; a second call changes nothing.

    The folder has the texts in `data`; checkpoints and the target are written there.
    """
    if not _has_ended(folder, steps):
        _train(folder, options, steps, seed)
    return average(folder, options.averaged)


def _train(folder: Path, options: TargetOptions, steps: int, seed: int) -> None:
    set_seed(seed)
    tokenizer = _vocabulary(folder, options)
    train, dev = (_encoded(tokenizer, folder / "data" / name, options) for name in ("train", "dev"))
    model = new_target(options, len(tokenizer))
    _learn(model, tokenizer, (train, dev), folder, options, steps, seed)


def _learn(
    model: MarianMTModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: tuple[_Examples, _Examples],
    folder: Path,
    options: TargetOptions,
    steps: int,
    seed: int,
) -> None:
    """Train until `steps` on examples to learn and held-out ones, from the last checkpoint."""
    train, held_out = examples
    model.set_attn_implementation("eager")
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=steps,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        lr_scheduler_type="inverse_sqrt",
        adam_beta2=0.98,
        label_smoothing_factor=0.1,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        eval_strategy="steps",
        eval_steps=options.save_every,
        disable_tqdm=True,
        per_device_eval_batch_size=32,
        prediction_loss_only=True,
        save_steps=options.save_every,
        save_total_limit=options.averaged,
        logging_steps=50,
        report_to="none",
        seed=seed,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=cast("Dataset[Any]", train),
        eval_dataset=cast("Dataset[Any]", held_out),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )
    lengths = [max(len(x["input_ids"]), len(x["labels"])) for x in train]
    trainer.batches = BatchSampler(lengths, options.batch_tokens, seed)
    trainer.train(resume_from_checkpoint=bool(_checkpoints(folder)))


def _vocabulary(folder: Path, options: TargetOptions) -> PreTrainedTokenizerFast:
    """The tokenizer in `folder`, trained if it is not there."""
    place = folder / "tokenizer"
    if not place.exists():
        texts = [line for side in ("en", "de") for line in lines(folder / f"data/train.{side}")]
        train_vocabulary(texts, options.vocab_size, options.max_positions).save_pretrained(place)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(place)
    return tokenizer


def _encoded(tokenizer: PreTrainedTokenizerFast, part: Path, options: TargetOptions) -> _Examples:
    """Tokens of pairs that fit, as the trainer takes them."""
    texts = (lines(part.with_suffix(f".{language}")) for language in ("en", "de"))
    sources, labels = (tokenizer(each)["input_ids"] for each in texts)
    return [
        {"input_ids": source, "labels": label}
        for source, label in zip(sources, labels, strict=True)
        if max(len(source), len(label)) < options.max_positions
    ]


def _checkpoints(folder: Path) -> list[Path]:
    found = (folder / "checkpoints").glob("checkpoint-*")
    return sorted(found, key=_step)


def _has_ended(folder: Path, steps: int) -> bool:
    """Whether a training has taken so many steps; it would take one more."""
    return max(map(_step, _checkpoints(folder)), default=0) >= steps


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def average(folder: Path, last: int, name: str = "target") -> Path:
    """Write the mean of the last checkpoints as a model of Transformers; return its folder."""
    found = _checkpoints(folder)[-last:]
    if not found:
        raise DataError(f"{folder}: no checkpoint; run `target` first.")
    weights = [load_file(path / "model.safetensors") for path in found]
    mean = {
        weight: torch.stack([each[weight].float() for each in weights]).mean(0)
        for weight in weights[0]
    }
    model = MarianMTModel.from_pretrained(found[-1])
    model.load_state_dict({**model.state_dict(), **mean})
    into = folder / name
    shutil.rmtree(into, ignore_errors=True)
    model.save_pretrained(into)
    PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer").save_pretrained(into)
    return into


# Drafters


Shape = Literal["shared", "full", "balanced", "small"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
"""Of Spec-Drafters. `shared` reads the target's encoder and is a decoder of two layers; the others
have an encoder of their own, as the paper's (see `new_masked_lm`)."""
MAIN = "specdec-shared"
"""The drafter of most tables: on a CPU, it learns most in a given time."""
AUTOREGRESSIVE = "autoregressive"
"""The draft model of table 14."""


class DrafterOptions(Config):
    """Which drafters are trained, and how.

    Args:
        heads: numbers of blockwise heads, for a drafter each.
        shapes: of Spec-Drafters.
        num_masks: their masks, as many as the longest drafts measured.
        masks: numbers of masks of further Spec-Drafters, of the shape `shared`.
        answers: how the target writes what they learn.
        spec_set: `--set` of `tokenleap train spec_drafter`. The published steps are far too many
            for a CPU. From the target's encoder, the drafter learns faster.
        heads_set: the same of `tokenleap train blockwise`.
        tokens: most tokens of answers to learn; the default is more than there are.
        held_out_tokens: of answers for evaluations while they learn.
        autoregressive_steps: of an autoregressive draft model's training; 0 for none.
    """

    heads: tuple[int, ...] = (10, 25)
    shapes: tuple[Shape, ...] = SHAPES
    num_masks: Annotated[int, Ge(25)] = 25
    masks: tuple[int, ...] = ()
    answers: Literal["greedy", "beam"] = "greedy"
    spec_set: tuple[str, ...] = (
        *("size=0.25", "max_steps=5000", "warmup_steps=500", "accumulation=1"),
        *("from_target=true", "evaluate_every=500"),
    )
    heads_set: tuple[str, ...] = ("max_steps=3000", "batch_tokens=1024", "evaluate_every=250")
    tokens: int = 2_000_000
    held_out_tokens: int = 2000
    autoregressive_steps: Annotated[int, Ge(0)] = 0

    def methods(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Of each drafter by its name: the method, and its `--set`."""
        answers = f"answers={self.answers}"
        spec = {f"specdec-{shape}": (shape, self.num_masks) for shape in self.shapes}
        spec |= {f"{MAIN}-{masks}": ("shared", masks) for masks in self.masks}
        found = dict[str, tuple[str, tuple[str, ...]]]()
        for name, (shape, masks) in spec.items():
            own = (*_shape(shape), f"num_masks={masks}", answers)
            found[name] = "spec_drafter", (*own, *self.spec_set)
        for heads in self.heads:
            found[f"blockwise-{heads}"] = "blockwise", (f"num_heads={heads}", *self.heads_set)
        return found

    def drafter_of(self, k: int, drafters: Container[str]) -> str | None:
        """Which of these drafts k tokens: one with k masks, or `MAIN` with its first ones."""
        if (own := f"{MAIN}-{k}") in drafters:
            return own
        return MAIN if MAIN in drafters and k <= self.num_masks else None


def _shape(shape: Shape) -> tuple[str, ...]:
    return ("shape=full", "encoder=target") if shape == "shared" else (f"shape={shape}",)


def train_command(name: str, out: Path, options: DrafterOptions) -> list[str]:
    """The command line that trains a drafter of the target in `out`, without the interpreter."""
    methods = options.methods()
    if name not in methods:
        raise BenchmarkError(f"no drafter {name!r}: choose from {', '.join(methods)}.")
    method, given = methods[name]
    return [
        *("tokenleap", "train", method, "--model", str(out / "target")),
        *("--source", str(out / "data/train.en"), "--target", str(out / "data/train.de")),
        *("--tokens", str(options.tokens), "--held-out-tokens", str(options.held_out_tokens)),
        *("--out", str(out / "drafters" / name)),
        *(word for each in given for word in ("--set", each)),
    ]


def train_drafters(
    out: Path, options: DrafterOptions, target: TargetOptions, only: Sequence[str] = ()
) -> None:
    """Train all drafters, or some; each goes on where it stopped, and nothing ends twice."""
    own = [AUTOREGRESSIVE] if options.autoregressive_steps else []
    for name in only or (*options.methods(), *own):
        if name in own:
            train_autoregressive(out, target, options.autoregressive_steps)
            continue
        command = train_command(name, out, options)
        if TrainingFolder(out / "drafters" / name).report.exists():
            continue
        share_answers(out / "drafters", name)
        print(shlex.join(command), file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, "-m", *command], check=False)
        if done.returncode:
            raise BenchmarkError(f"the training of {name} has failed; run it again to go on.")


def train_autoregressive(out: Path, options: TargetOptions, steps: int) -> None:
    """A draft model that learns the answers of the Spec-Drafter's training."""
    folder = out / "drafters" / AUTOREGRESSIVE
    if _has_ended(folder, steps):
        return
    set_seed(0)
    share_answers(folder.parent, AUTOREGRESSIVE)
    if not TrainingFolder(folder).conversations("train").exists():
        raise BenchmarkError(f"{AUTOREGRESSIVE} learns a Spec-Drafter's answers: train one first.")
    shutil.copytree(out / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    target = MarianMTModel.from_pretrained(out / "target")
    config = deepcopy(target.config)
    config.decoder_layers = 2
    copy_target(target, model := MarianMTModel(config))
    files = (TrainingFolder(folder).conversations(part) for part in ("train", "held_out"))
    train, held_out = (
        [
            {"input_ids": list(each.source), "labels": list(each.tokens[1:])}
            for each in ConversationFile(file)
        ]
        for file in files
    )
    _learn(model, _vocabulary(folder, options), (train, held_out), folder, options, steps, 0)
    average(folder, options.averaged)


def share_answers(folder: Path, name: str) -> None:
    """Give a drafter the answers that a Spec-Drafter has learnt, if it has none yet."""
    own = TrainingFolder(folder / name)
    for other in sorted(folder.glob("specdec-*/training/report.json")):
        if own.conversations("train").exists():
            return
        for part in ("train", "held_out"):
            there = TrainingFolder(other.parents[1]).conversations(part)
            own.conversations(part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(there, own.conversations(part))


def drafters_in(out: Path, options: DrafterOptions) -> Mapping[str, Path]:
    """By name, the folders of those that are written; a training may still make them better."""
    folders = {name: out / "drafters" / name for name in options.methods()}
    folders[AUTOREGRESSIVE] = out / "drafters" / AUTOREGRESSIVE / "target"
    return {name: path for name, path in folders.items() if (path / "config.json").exists()}
