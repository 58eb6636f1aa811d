"""Program of `tests/test_tensor_parallel.py` for every process that torchrun starts.

    torchrun --nproc-per-node 2 -m tests.sharded_programs PLAN.json OUTPUT

Each process writes what it found to OUTPUT.RANK.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.tiny import VOCAB_SIZE
from tokenleap import LLM, AsyncLLM
from tokenleap.core.peers import OutOfStepError
from tokenleap.core.tree import TokenTree
from tokenleap.models.load import load_model
from tokenleap.runtime.network import Need

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4], [9, 8, 7, 9, 8, 7, 9, 8], [40, 41, 42]]
GREEDY = {"temperature": 0, "max_tokens": 24}
SEEDED = {"temperature": 0.9, "top_k": 30, "seed": 5, "max_tokens": 24}


def tokens(llm: LLM, config: Any = None, params: Any = None) -> list[list[int]]:
    """Token ids of all prompts."""
    outputs = llm.generate(PROMPTS, params or GREEDY, speculative_config=config)
    return [list(each.outputs[0].token_ids) for each in outputs]


def refusal(act: Callable[[], object]) -> str:
    """The error of what is refused."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def digest(llm: LLM) -> list[int]:
    """Of the bits of a tree's logits and of all its hidden states."""
    target = llm.engine.target
    tree = TokenTree((3, 4, 5, 6), (-1, 0, 0, 1))
    target.add(-1)
    target.prefill(-1, [1, 2])
    layers = tuple(range(target.network.num_layers + 1))
    (output,) = target.verify([-1], [tree], need=Need(hidden=layers))
    found = [output.scores, *output.hidden.values()]
    assert output.scores.shape == (4, VOCAB_SIZE)
    digests = [zlib.crc32(each.contiguous().numpy().tobytes()) for each in found]
    target.remove(-1)
    return digests


def main() -> None:
    """Run the plan."""
    plan, output = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    found: dict[str, Any] = {}
    for name, folder in plan["models"].items():
        llm = LLM(folder, dtype="float32", tensor_parallel_size=2)
        own = found[name] = {"shown": repr(llm), "exact": llm.bit_exact, "digest": digest(llm)}
        configs = plan["configs"] if name == "llama" else plan["configs"][:2]
        own["greedy"] = [tokens(llm, config) for config in configs]
        own["seeded"] = [tokens(llm, config, SEEDED) for config in configs]
    llm = LLM(
        plan["models"]["llama"],
        dtype="float32",
        tensor_parallel_size=2,
        speculative_config={"method": "ngram"},
    )
    rank = llm.engine.target.peers.rank
    found["controller"] = llm.controller
    found["unseeded"] = tokens(llm, params={"temperature": 1, "max_tokens": 12})
    module = load_model(Path(plan["models"]["llama"]), torch.float32, torch.device("cpu"), 2)
    mine = (p.to_local() if isinstance(p, DTensor) else p for p in module.parameters())
    found["numbers"] = sum(weight.numel() for weight in mine)
    found["loaded"] = tokens(LLM(module, tensor_parallel_size=2))
    found["refused"] = {
        "async": refusal(lambda: AsyncLLM(llm)),
        "online": refusal(lambda: tokens(llm, {**plan["head"], "online": {"every": 1}})),
        "more processes": refusal(lambda: LLM(plan["models"]["llama"], tensor_parallel_size=4)),
        "one process": refusal(lambda: LLM(module)),
        **{
            name: refusal(lambda folder=folder: LLM(folder, tensor_parallel_size=2))  # type: ignore[misc]
            for name, folder in plan["refused"].items()
        },
    }
    different = [[1, 2, 3, rank]]
    found["out of step"] = refusal(lambda: llm.generate(different, GREEDY))
    assert OutOfStepError.__name__ in found["out of step"]
    Path(f"{output}.{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
