"""A conversation in the terminal; answers appear while they are generated.

    python examples/chat_loop.py
    python examples/chat_loop.py --model path/to/a/chat/model --max-tokens 400

An empty line or Ctrl-D ends the conversation. The method `suffix` drafts from the conversation and
from earlier answers. The KV of earlier turns comes from the prefix cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tokenleap import LLM, SamplingParams


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=200)
    options = parser.parse_args(arguments)

    llm = LLM(options.model, speculative_config={"method": "suffix"})
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    messages: list[dict[str, str]] = []
    print("You: ", end="", flush=True)
    for line in map(str.strip, sys.stdin):
        if not line:
            break
        messages.append({"role": "user", "content": line})
        answer = ""
        for chunk in llm.stream(messages, params):
            print(chunk.text, end="", flush=True)
            answer += chunk.text
            if chunk.output is not None:
                metrics = chunk.output.metrics
                print(f"\n[{metrics.generated_tokens} tokens in {metrics.target_passes} passes]")
        messages.append({"role": "assistant", "content": answer})
        print("You: ", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
