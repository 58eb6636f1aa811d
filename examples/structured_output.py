"""JSON that follows a schema: the tokens that the schema forces are drafted at almost no cost.

    python examples/structured_output.py
    python examples/structured_output.py --text "Ada Lovelace, born 1815, of London"

It needs the extra `structured`. At every drafted position, tokens that the schema does not allow
have probability 0. So the output has the same distribution as without drafts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from tokenleap import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "born": {"type": "integer", "minimum": 0, "maximum": 2100},
        "city": {"type": "string", "maxLength": 30},
    },
    "required": ["name", "born", "city"],
    "additionalProperties": False,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", default="Bob Miller, born 1990, of Paris")
    parser.add_argument("--max-tokens", type=int, default=100)
    options = parser.parse_args(arguments)

    # `regex` drafts what the schema forces, and `ngram` copies names from the prompt.
    drafters = [{"method": "regex"}, {"method": "ngram"}]
    llm = LLM(options.model, speculative_config={"method": "ensemble", "drafters": drafters})
    form = {"json": SCHEMA, "disable_any_whitespace": True}
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, structured_outputs=form)
    messages = [{"role": "user", "content": f"Write this person as JSON: {options.text}"}]
    out = llm.chat(messages, params)[0]
    print(out.text)
    if out.finish_reason == "stop":  # else max_tokens cut it off
        print(json.loads(out.text))
    metrics = out.metrics
    print(f"{metrics.generated_tokens} tokens in {metrics.target_passes} passes")


if __name__ == "__main__":
    main()
