"""Edit a file: the model rewrites it, and drafts come from the file as it was.

    python examples/predicted_edit.py notes.py "Rename `count` to `total`."

The output is the same with and without the prediction; only the speed differs. A model of 135M
parameters edits a few lines at best: take a larger one for real files (`--model`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tokenleap import LLM, SamplingParams


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer with the changed file, and say what the prediction has saved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("change")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=1024)
    given = parser.parse_args(arguments)

    text = given.file.read_text()
    llm = LLM(given.model)
    messages = [{"role": "user", "content": f"{given.change} Answer with the file.\n\n{text}"}]
    params = SamplingParams(temperature=0, max_tokens=given.max_tokens)
    (result,) = llm.chat(messages, params, prediction=text)

    metrics = result.metrics
    print(result.text)
    print(
        f"{metrics.generated_tokens} tokens in {metrics.target_passes} passes; of the prediction, "
        f"{metrics.accepted_prediction_tokens} tokens were accepted and "
        f"{metrics.rejected_prediction_tokens} rejected"
    )


if __name__ == "__main__":
    main()
