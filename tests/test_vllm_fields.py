"""The table of vLLM's sampling parameters in docs/api.md is true and complete."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from tokenleap import ConfigError, SamplingParams
from tokenleap.cli.options import SamplingOptions
from tokenleap.cli.root import SAMPLING
from tokenleap.core.structured import StructuredOutputs
from tokenleap.serve.fields import SAMPLED, SamplingBody

PAGE = (Path(__file__).parents[1] / "docs/api.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| (`.*`) \| (.*) \|$", PAGE.partition("## vLLM's sampling parameters")[2], re.MULTILINE
)
NAMES = {
    name: says.partition(",")[0].partition(":")[0].partition(";")[0]
    for names, says in ROWS
    for name in re.findall(r"`(\w+)`", names)
}

# The fields of vLLM's SamplingParams, without those that concern its own workings alone
# (skip_clone, output_text_buffer_length, routed_experts_prompt_start), and earlier ones.
VLLM = re.findall(
    r"\w+",
    """
n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens
spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval
structured_outputs logit_bias allowed_token_ids extra_args bad_words skip_reading_prefix_cache
thinking_token_budget repetition_detection trace_decode_token_ids
truncate_prompt_tokens logits_processors best_of use_beam_search guided_decoding
""",
)
OWN = {"beam_width", "length_penalty", "early_stopping", "renormalize_logits"}


def test_every_field_is_in_the_table() -> None:
    assert sorted(NAMES) == sorted(VLLM)
    assert set(NAMES.values()) == {"yes", "no"}
    here = {name for name, says in NAMES.items() if says == "yes"}
    assert here | OWN == set(SamplingParams.field_names())
    forms = next(says for names, says in ROWS if "structured_outputs" in names)
    assert set(re.findall(r"`(\w+)`", forms)) == set(StructuredOutputs.field_names())


@pytest.mark.parametrize("name", [name for name, says in NAMES.items() if says == "no"])
def test_what_is_not_there_is_refused_with_a_pointer(name: str) -> None:
    fields: dict[str, Any] = {name: 1}
    with pytest.raises(ConfigError, match=f"has no field '{name}': (?!known|did you mean)"):
        SamplingParams(**fields)


def test_vllms_defaults_are_accepted() -> None:
    none: dict[str, Any] = dict.fromkeys(
        [
            *("seed", "stop", "stop_token_ids", "logprobs", "prompt_logprobs", "bad_words"),
            *("structured_outputs", "logit_bias", "allowed_token_ids", "truncate_prompt_tokens"),
            "skip_reading_prefix_cache",
        ]
    )
    assert SamplingParams(**none) == SamplingParams()


def test_the_server_and_the_shell_have_what_the_fields_say() -> None:
    """Types and descriptions; `SamplingParams` itself checks the bounds."""
    for name in SAMPLED:
        assert SamplingBody.model_fields[name].description == described(name)
    shown = {item.name: item for item in dataclasses.fields(SamplingOptions)}
    hints = get_type_hints(SamplingOptions, include_extras=True)
    for name in SAMPLING:
        (option,) = hints[name].__metadata__
        assert described(name).replace("\n", " ").startswith(option.help.partition(". May")[0][:-1])
        assert shown[name].default in (None, False)


def described(name: str) -> str:
    text = SamplingParams.model_fields[name].description
    assert text
    return text
