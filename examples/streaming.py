"""Two requests at once, streamed with `LLMEngine`.

    python examples/streaming.py

Both requests share every pass of the model. Each chunk has the tokens that one step committed. If
the step accepted drafted tokens, there are several. For a single request, use `LLM.stream`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tokenleap import LLM, SamplingParams

PROMPTS = {
    "counting": "One, two, three, one, two, three, one, two,",
    "story": "Once upon a time, in a small village,",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=40)
    options = parser.parse_args(arguments)

    engine = LLM(options.model, speculative_config={"method": "ngram"}).engine
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    for name, prompt in PROMPTS.items():
        engine.add_request(prompt, params, request_id=name)

    while engine.has_unfinished_requests():
        for chunk in engine.step():
            pieces = [f"{token.text!r} ({token.origin})" for token in chunk.tokens]
            print(f"{chunk.request_id:>8}: {', '.join(pieces)}")
            if chunk.output is not None:
                print(f"{chunk.request_id:>8}: ended ({chunk.output.finish_reason})")


if __name__ == "__main__":
    main()
