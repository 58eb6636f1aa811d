"""The same prompts with several methods: identical tokens, different speed.

    python examples/compare_methods.py
    python examples/compare_methods.py --methods none,ngram,suffix,recycle --max-tokens 200

The model is loaded once, because each request may have its own method. For numbers that you can
rely on, use `tokenleap bench`: the methods take turns, every prompt is repeated, and the results
have intervals.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tokenleap import LLM, SamplingParams

PROMPTS = [
    "Repeat the list: apples, pears, plums, cherries. The list is: apples, pears,",
    "The seven days of the week are",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", default="none,ngram,suffix")
    parser.add_argument("--max-tokens", type=int, default=100)
    options = parser.parse_args(arguments)

    llm = LLM(options.model)
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    print(f"{'method':<12} tokens/s   tokens per drafting pass   same tokens")
    expected = None
    for method in options.methods.split(","):
        config = {"method": method}
        llm.generate(PROMPTS[0], params, speculative_config=config)  # warm up
        outs = [llm.generate(p, params, speculative_config=config)[0] for p in PROMPTS]
        found = [out.token_ids for out in outs]
        expected = expected or found
        seconds = sum(out.metrics.seconds for out in outs)
        speed = sum(map(len, found)) / seconds
        drafts = sum(out.metrics.num_drafts for out in outs)
        accepted = sum(out.metrics.num_accepted_tokens for out in outs)
        length = 1 + accepted / max(1, drafts)
        print(f"{method:<12} {speed:8.1f}   {length:24.2f}   {found == expected!s:>11}")


if __name__ == "__main__":
    main()
