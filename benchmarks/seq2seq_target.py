"""A small translator to be the target of `benchmarks.seq2seq`: its vocabulary and its training.

A Marian model, trained by Transformers' `Seq2SeqTrainer` as the base models of the literature are:
label smoothing of 0.1, Adam (0.9, 0.98), an inverse square root schedule, batches by tokens. Passes
are in bfloat16, weights and optimizer in float32. Attention is `eager`: in training with short
texts on a CPU, that is faster than PyTorch's fused kernel.

    python -m benchmarks.seq2seq target OUT

saves to `OUT/checkpoints`, goes on from the last one when called again, and writes the mean of the
last checkpoints to `OUT/target`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

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

from benchmarks.seq2seq_batches import TokenBatches
from tokenleap.core.config import Config
from tokenleap.errors import DataError

__all__ = ["TargetOptions", "new_target", "train_target", "train_vocabulary"]

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


def lines(path: Path) -> list[str]:
    """The lines of a text file; a line may hold any character but a line feed.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}; run `data` first.") from None


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
    ids: dict[str, Any] = {
        f"{name}_token_id": place for place, name in enumerate(("bos", "pad", "eos"))
    }
    sides: dict[str, Any] = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", options.layers),
            ("attention_heads", options.heads),
            ("ffn_dim", options.feed_forward),
        )
    }
    config = MarianConfig(
        vocab_size=vocab_size,
        decoder_vocab_size=vocab_size,
        d_model=options.width,
        max_position_embeddings=options.max_positions,
        dropout=options.dropout,
        activation_function="relu",
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        decoder_start_token_id=ids["bos_token_id"],
        forced_eos_token_id=None,
        **ids,
        **sides,
    )
    model = MarianMTModel(config)
    model.generation_config.max_length = options.max_positions
    return model


class _Trainer(Seq2SeqTrainer):
    """With batches by tokens."""

    batches: TokenBatches

    def get_train_dataloader(self) -> DataLoader[Any]:
        """See `Trainer.get_train_dataloader`."""
        loader: DataLoader[Any] = DataLoader(
            cast("Dataset[Any]", self.train_dataset),
            batch_sampler=self.batches,
            collate_fn=self.data_collator,
        )
        prepared: DataLoader[Any] = self.accelerator.prepare(loader)
        return prepared


def train_target(folder: Path, options: TargetOptions, steps: int, seed: int = 0) -> Path:
    """Train until `steps`, from the last checkpoint if there is one; a second call changes nothing.

    Args:
        folder: has the texts in `data`; checkpoints and the target are written here.
        options: of the target.
        steps: updates in all.
        seed: of weights, order and dropout.

    Returns:
        The folder of the target.
    """
    if _steps_of(folder) < steps:  # the trainer would take one more step
        _train(folder, options, steps, seed)
    return average(folder, options.averaged)


def _train(folder: Path, options: TargetOptions, steps: int, seed: int) -> None:
    set_seed(seed)
    tokenizer = _vocabulary(folder, options)
    examples = {
        part: _encoded(tokenizer, folder / "data" / part, options) for part in ("train", "dev")
    }
    model = new_target(options, len(tokenizer))
    model.set_attn_implementation("eager")
    on_cpu = not torch.cuda.is_available()
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
        use_cpu=on_cpu,
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
        train_dataset=cast("Dataset[Any]", examples["train"]),
        eval_dataset=cast("Dataset[Any]", examples["dev"]),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )
    lengths = [max(len(x["input_ids"]), len(x["labels"])) for x in examples["train"]]
    trainer.batches = TokenBatches(lengths, options.batch_tokens, seed)
    trainer.train(resume_from_checkpoint=bool(_checkpoints(folder)))


def _vocabulary(folder: Path, options: TargetOptions) -> PreTrainedTokenizerFast:
    """The tokenizer in `folder`, trained if it is not there."""
    place = folder / "tokenizer"
    if not place.exists():
        texts = [line for side in ("en", "de") for line in lines(folder / f"data/train.{side}")]
        train_vocabulary(texts, options.vocab_size, options.max_positions).save_pretrained(place)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(place)
    return tokenizer


def _encoded(
    tokenizer: PreTrainedTokenizerFast, part: Path, options: TargetOptions
) -> list[dict[str, list[int]]]:
    """Tokens of pairs that fit, as the trainer takes them."""
    texts = (lines(part.with_suffix(f".{language}")) for language in ("en", "de"))
    sources, labels = (tokenizer(each)["input_ids"] for each in texts)
    return [
        {"input_ids": source, "labels": label}
        for source, label in zip(sources, labels, strict=True)
        if max(len(source), len(label)) < options.max_positions
    ]


def _checkpoints(folder: Path) -> list[Path]:
    """Those that are kept, in order."""
    found = (folder / "checkpoints").glob("checkpoint-*")
    return sorted(found, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def _steps_of(folder: Path) -> int:
    """Updates until the last checkpoint."""
    return max(map(_step, _checkpoints(folder)), default=0)


def average(folder: Path, last: int, name: str = "target") -> Path:
    """Write the mean of the last checkpoints as a model of Transformers.

    Args:
        folder: of everything.
        last: how many; fewer if there are fewer.
        name: of the model's folder, in `folder`.

    Returns:
        The model's folder.

    Raises:
        DataError: there is no checkpoint.
    """
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
