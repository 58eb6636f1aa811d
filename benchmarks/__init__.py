"""Measurements for developing Tokenleap that `tokenleap bench` cannot make.

Run them from the project root:

    python -m benchmarks.compare A B                  two commits take turns: speed and tokens
    python -m benchmarks.identity --prompts FILE      every method's output against plain decoding's
    python -m benchmarks.contract --prompts FILE      never slower: by batch size and kind of text
    python -m benchmarks.contract_seq2seq --wheels FOLDER   the same for encoder-decoders
    python -m benchmarks.quantization --prompts FILE  how far quantized weights move p
    python -m benchmarks.step_cost                    what a pass costs, and the rest of a step
    python -m benchmarks.tree_cost                    a token tree against one batch row per path
    python -m benchmarks.memory, load_memory          peak memory by batch size; of loading
    python -m benchmarks.prediction, references       edits of a text that is given, too
    python -m benchmarks.trained --out FOLDER         all drafters that can be trained, on one text
    python -m benchmarks.seq2seq all FOLDER           SpecDec's tables on a translator
    python -m benchmarks.public_seq2seq               two published encoder-decoders
    python -m benchmarks.topic_shift --head HEAD --out FOLDER   learning while serving
    python -m benchmarks.control_replay --prompts FILE --recorded FILE   parts of the controller
    python -m benchmarks.draft_replay --recorded FILE   the controller against fixed draft lengths
    python -m benchmarks.gpu                          on a GPU: its tests, networks, bits, drafters
    python -m benchmarks.serving --prompts FILE --gguf FILE   load on `tokenleap serve` and others

They share the runner of `benchmarks.harness`: contestants take turns on every item of every round.
How much faster a method is on your prompts: `tokenleap bench` (docs/bench.md). Prompts are files as
in `tokenleap.bench.prompts_file`; the project has none.
"""

from __future__ import annotations

__all__ = ["BenchmarkError"]


class BenchmarkError(ValueError):
    """Wrong use of a benchmark; the message is one line."""
