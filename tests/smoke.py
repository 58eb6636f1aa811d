"""Try an installed wheel: it runs natively at once, on a machine without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tokenleap import LLM, SamplingParams
from tokenleap.runtime.native import build

CHECKOUT = Path(__file__).parents[1]
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


def main() -> None:
    assert not Path(build.__file__).is_relative_to(CHECKOUT / "src"), build.__file__
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(TOKENLEAP_CACHE=cache, PATH="", CXX="")
        doctor = [sys.executable, "-m", "tokenleap", "doctor"]
        print(subprocess.run(doctor, check=True, capture_output=True, text=True).stdout)
        assert build.library_origin().startswith("prebuilt"), build.library_origin()
        one_openmp()
        here = torch.cpu.get_capabilities()
        for variant in build.variants():
            if variant.runs_on(here):
                try_variant(variant)
        assert not (Path(cache) / "native").exists()
    print(build.__file__, build.library_origin(), sep="\n")


def try_variant(variant: build.Variant) -> None:
    """Load its library as on a processor that has no more than it needs, and compare tokens."""
    build._library.cache_clear()
    capabilities = dict.fromkeys(variant.needs, True)
    with patch("torch.cpu.get_capabilities", return_value=capabilities):
        assert build.library_origin() == f"prebuilt for {variant.name}"
    tokens = [generated(config) for config in (None, {"method": "ngram"})]
    print(variant.name, tokens[0])
    assert tokens[0] == tokens[1]


def one_openmp() -> None:
    """On Linux, PyTorch's OpenMP is the library's, too: two would compete for the cores."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = {line.split()[-1] for line in lines if "gomp" in line or "libomp" in line}
    assert len(loaded) <= 1, loaded


def generated(speculative_config: dict[str, str] | None) -> list[int]:
    """Greedy tokens of a small random model on the native runtime."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with LLM(
        LlamaForCausalLM(config), runtime="native", speculative_config=speculative_config
    ) as llm:
        assert llm.bit_exact
        params = SamplingParams(temperature=0, max_tokens=32)
        return list(llm.generate([PROMPT], params)[0].token_ids)


if __name__ == "__main__":
    main()
