"""Translate with an encoder-decoder: plain decoding, drafts, and a beam search.

    python examples/translate.py --model path/to/translator

The model is a Hugging Face folder, such as a Marian, mBART, NLLB or T5 one. With `--drafter`, a
folder that `tokenleap train spec_drafter` has written, the drafts come from there. Else they come
from earlier outputs. Neither changes a translation.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from tokenleap import LLM, BeamSearchParams, RequestOutput, SamplingParams

SENTENCES = (
    "The weather is nice today.",
    "She bought two apples and a loaf of bread.",
    "The train to the city leaves at nine in the morning.",
)
"""Plain sentences: a translator takes anything else, such as an instruction, for its text, too."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sentences", nargs="*", default=SENTENCES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--from", dest="source_language", help="such as en_XX, of mBART or NLLB")
    parser.add_argument("--to", dest="target_language")
    parser.add_argument("--beam-width", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=60)
    options = parser.parse_args(arguments)

    llm = LLM(options.model)
    languages = {
        name: value
        for name in ("source_language", "target_language")
        if (value := getattr(options, name)) is not None
    }
    prompts = [{"prompt": sentence, **languages} for sentence in options.sentences]
    greedy = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    drafts: Mapping[str, Any] = {"method": "suffix"}
    if options.drafter:
        drafts = {"method": "spec_drafter", "model": options.drafter}

    plain = llm.generate(prompts, greedy, speculative_config={"method": "none"})
    drafted = llm.generate(prompts, greedy, speculative_config=drafts)
    beams = BeamSearchParams(beam_width=options.beam_width, max_tokens=options.max_tokens)
    found = llm.beam_search(prompts, beams)
    for sentence, one, two, three in zip(options.sentences, plain, drafted, found, strict=True):
        print(sentence)
        print(f"  {'plain':12} {described(one)}")
        print(f"  {drafts['method']:12} {described(two)}  same: {one.token_ids == two.token_ids}")
        best = three.sequences[0]
        print(f"  {'beams':12} {best.text}  (score {best.score:.2f})")


def described(output: RequestOutput) -> str:
    metrics = output.metrics
    return f"{output.text}  ({metrics.generated_tokens} tokens, {metrics.target_passes} passes)"


if __name__ == "__main__":
    main()
