"""Models whose weights are spread over two processes: the same tokens as in one, in every method.

All of it is one launch of `torchrun`, which takes a quarter of a minute, and one of the shell.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.cli.terminal import environment
from tests.heads import tiny_head
from tests.sharded_programs import GREEDY, SEEDED, tokens
from tests.tiny import GROUPED, VOCAB_SIZE, tiny_model, tiny_tokenizer
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap import LLM

pytestmark = pytest.mark.slow

SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
WINDOW = {"head_dim": 16, "sliding_window": 16}
EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MORE: dict[str, dict[str, Any]] = {
    "gemma2": WINDOW,
    "mistral": WINDOW,
    "phi3": {},  # its layers are split in other ways
    "qwen3_moe": EXPERTS,  # Transformers' own layers of experts
}

LAUNCHER = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]


def launch(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a module in two processes."""
    return subprocess.run(
        [sys.executable, *LAUNCHER, *(str(each) for each in arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=1200,
    )


def model_of(model_type: str, **more: Any) -> PreTrainedModel:
    """A tiny model of an architecture that `tests.tiny` does not have."""
    config = AutoConfig.for_model(
        model_type, vocab_size=VOCAB_SIZE, **{**SPECIAL, **GROUPED, **more}
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models by their names; `draft` drafts for `llama`."""
    root = tmp_path_factory.mktemp("models")
    models = {
        **{name: model_of(name, **more) for name, more in MORE.items()},
        "llama": tiny_model("llama"),
        "qwen2": tiny_model("qwen2"),
        "qwen3": tiny_model("qwen3", tie_word_embeddings=True),
        "draft": tiny_model("llama", seed=1),
        "gpt2": tiny_model("gpt2"),
        "one key head": tiny_model("llama", num_key_value_heads=1),
        "t5": tiny_seq2seq("t5"),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
    tiny_tokenizer().save_pretrained(root / "llama")
    return {name: str(root / name) for name in models}


def test_two_processes(folders: dict[str, str], tmp_path: Path) -> None:
    head = {"method": "eagle", "model": tiny_head()}
    configs: list[dict[str, Any]] = [
        {"method": "none"},
        {"method": "ngram"},
        {"method": "suffix"},
        {"method": "draft_model", "model": folders["draft"], "num_speculative_tokens": 3},
        head,
        {"method": "medusa", "model": tiny_head("medusa")},
        {"method": "hybrid", "lookup": {"method": "ngram"}, "model": tiny_head()},
        {"method": "early_exit", "exit_layer": 1},
    ]
    names = ("llama", "qwen2", "qwen3", *MORE)
    plan = {
        "models": {name: folders[name] for name in names},
        "configs": configs,
        "head": head,
        "refused": {name: folders[name] for name in ("gpt2", "one key head", "t5")},
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = launch("tests.sharded_programs", tmp_path / "plan.json", tmp_path / "found")
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"found.{rank}").read_text()) for rank in (0, 1))
    assert first == second  # the bits of logits and hidden states are in it
    for name in names:
        found, one = first[name], LLM(folders[name], dtype="float32", runtime="torch")
        assert "runtime='module', tensor_parallel_size=2" in found["shown"]
        assert found["exact"] or name == "qwen3_moe"  # whose experts get other numbers of tokens
        for kind, params in (("greedy", GREEDY), ("seeded", SEEDED)):
            expected = tokens(one, params=params)
            for config, each in zip(configs, found[kind], strict=False):
                assert each == expected, (name, kind, config)
    whole = sum(weight.numel() for weight in tiny_model("llama").parameters())
    assert whole / 2 < first["numbers"] < 0.51 * whole  # norms are in both processes
    assert first["loaded"] == first["llama"]["greedy"][0]
    assert first["controller"] == "cost_model"
    refused = {
        "async": "ConfigError: tensor_parallel_size: AsyncLLM runs a model in one process",
        "online": "ConfigError: online: a drafter learns while it serves in one process only",
        "more processes": "ConfigError: tensor_parallel_size: there are 2 processes, got 4",
        "one process": "ConfigError: tensor_parallel_size: the loaded model is in 2 processes",
        "gpt2": "CompatibilityError: tensor_parallel_size: Transformers has no plan (tp_plan)",
        "one key head": "CompatibilityError: tensor_parallel_size: this model has 1 key-value head",
        "t5": "CompatibilityError: tensor_parallel_size: a model of the type 't5' is an encoder",
    }
    assert first["refused"].keys() == refused.keys()
    for name, begin in refused.items():
        assert first["refused"][name].startswith(begin), first["refused"][name]
    assert "are out of step" in first["out of step"]


def test_shell(folders: dict[str, str], tmp_path: Path) -> None:
    """One process writes; the file of results can be continued."""
    (tmp_path / "in.txt").write_text("hello\nhello again\n")
    given = ["-m", folders["llama"], "--dtype", "float32", "--max-tokens", 8, "--temperature", 0]
    out = tmp_path / "out.jsonl"
    lines = ["--file", tmp_path / "in.txt", "--jsonl", "--output", out]
    both = ["tokenleap", "generate", *given, "--tensor-parallel-size", 2]
    done = launch(*both, *lines)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    one = LLM(folders["llama"], dtype="float32", runtime="torch")
    for record, prompt in zip(records, ("hello", "hello again"), strict=True):
        (expected,) = one.generate(prompt, {"temperature": 0, "max_tokens": 8})
        assert record["token_ids"] == list(expected.outputs[0].token_ids)
    text = launch(*both, "hello", "--json")
    assert text.returncode == 0, text.stderr
    assert json.loads(text.stdout)["token_ids"] == records[0]["token_ids"]
    out.write_text(out.read_text().splitlines()[0] + "\n")
    assert launch(*both, *lines, "--resume").returncode == 0
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["token_ids"] for each in again] == [each["token_ids"] for each in records]
