"""The tables of vLLM's names in docs/api.md are true and complete."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from tests.serve.support import tiny_llm
from tokenleap import (
    LLM,
    BeamSearchParams,
    ConfigError,
    ModelError,
    PromptError,
    RequestError,
    SamplingParams,
    TokenleapError,
    TokensPrompt,
)
from tokenleap.cli.options import SamplingOptions
from tokenleap.cli.root import SAMPLING
from tokenleap.core.structured import StructuredOutputsParams
from tokenleap.serve.fields import SAMPLED, SamplingBody

PAGE = (Path(__file__).parents[1] / "docs/api.md").read_text(encoding="utf-8")


def table(title: str) -> dict[str, str]:
    """The first word of what the table under this title says of each name."""
    section = re.split(r"^#", PAGE.partition(f"# {title}\n")[2], flags=re.MULTILINE)[0]
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", section, re.MULTILINE)
    return {
        name: re.split("[,:;]", says)[0]
        for names, says in rows
        for name in re.findall(r"`(\w+)`", names)
    }


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


NAMES = table("vLLM's sampling parameters")

# The fields of vLLM's SamplingParams, without those that concern its own workings alone
# (skip_clone, output_text_buffer_length, routed_experts_prompt_start), and earlier ones.
VLLM = words(
    """
n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens
spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval
structured_outputs logit_bias allowed_token_ids extra_args bad_words skip_reading_prefix_cache
thinking_token_budget repetition_detection trace_decode_token_ids watermarking
truncate_prompt_tokens logits_processors best_of use_beam_search guided_decoding
"""
)
GREEDY = SamplingParams(temperature=0, max_tokens=4)
OWN = {"beam_width", "length_penalty", "early_stopping", "renormalize_logits"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm() as made:
        yield made


def test_every_field_is_in_the_table() -> None:
    assert sorted(NAMES) == sorted(VLLM)
    assert set(NAMES.values()) == {"yes", "no"}
    here = {name for name, says in NAMES.items() if says == "yes"}
    assert here | OWN == set(SamplingParams.field_names())
    (forms,) = re.findall(r"^\| `structured_outputs` \| (.*) \|$", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", forms)) == set(StructuredOutputsParams.field_names())


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


# The names of vLLM 0.33's `LLM`, of its results, and of the arguments of its methods.

ARGUMENTS = words(
    """
model runner convert tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code
allowed_local_media_path allowed_media_domains tensor_parallel_size dtype quantization revision
tokenizer_revision chat_template seed gpu_memory_utilization cpu_offload_gb offload_group_size
offload_num_in_group offload_prefetch_step offload_params enforce_eager
enable_return_routed_experts return_sampling_mask disable_custom_all_reduce hf_token hf_overrides
mm_processor_kwargs pooler_config structured_outputs_config profiler_config attention_config
kv_cache_memory_bytes compilation_config quantization_config logits_processors spec_method
spec_model spec_tokens
"""
)
ATTRIBUTES_OF_LLM = words(
    """
from_engine_args get_tokenizer get_world_size reset_mm_cache get_default_sampling_params generate
enqueue wait_for_completion collective_rpc apply_model chat enqueue_chat start_profile stop_profile
reset_prefix_cache sleep release_kv_cache_memory wake_up get_metrics llm_engine beam_search encode
embed classify score init_weight_transfer_engine shutdown_weight_transfer_engine
start_weight_update start_draft_weight_update update_weights finish_weight_update
update_weight_version get_weight_version
"""
)
GENERATE = words(
    "prompts sampling_params use_tqdm lora_request priority tokenization_kwargs mm_processor_kwargs"
)
CHAT = words(
    """
messages chat_template chat_template_content_format add_generation_prompt tools
continue_final_message chat_template_kwargs
"""
)
CALLS = {
    "generate": GENERATE,
    "chat": [*GENERATE[1:], *CHAT],
    "beam_search": words("prompts params lora_request use_tqdm concurrency_limit priority"),
}
OF_REQUEST = words(
    """
request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics lora_request
encoder_prompt encoder_prompt_token_ids num_cached_tokens num_cache_creation_tokens
prompt_token_id_logprobs kv_transfer_params ec_transfer_params
"""
)
OF_COMPLETION = words(
    """
index text token_ids cumulative_logprob logprobs routed_experts finish_reason stop_reason
lora_request sampling_mask spec_decode_metrics weight_versions finished
"""
)


def test_the_arguments_of_a_model() -> None:
    says = table("Arguments of `LLM`")
    assert sorted(says) == sorted(ARGUMENTS)
    here = set(inspect.signature(LLM.__init__).parameters)
    assert {name for name, word in says.items() if word == "yes"} == here & set(ARGUMENTS)
    make: Any = LLM
    for name in set(says) - here:
        with pytest.raises(ConfigError, match=f"LLM.. takes no argument '{name}': (?!known|did)"):
            make("none", **{name: "x"})
        with pytest.raises(ModelError):  # which shows that it gets beyond the arguments
            make("none", **{name: None})


def test_the_attributes_of_a_model(llm: LLM) -> None:
    says = table("Attributes of `LLM`")
    assert sorted(says) == sorted(ATTRIBUTES_OF_LLM)
    for name, word in says.items():
        if word == "no":
            with pytest.raises(AttributeError, match=f"LLM has no attribute '{name}': \\w"):
                getattr(llm, name)
        else:
            assert callable(getattr(llm, name))
    with pytest.raises(AttributeError, match="LLM has no attribute 'zzz'"):
        llm.zzz  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("method", CALLS)
def test_the_arguments_of_methods(llm: LLM, method: str) -> None:
    says = table("Arguments of its methods")
    assert set(says) == {name for names in CALLS.values() for name in names}
    call = getattr(llm, method)
    given: list[Any] = [[{"role": "user", "content": "hi"}]] if method == "chat" else [[1]]
    if method == "beam_search":
        given.append(BeamSearchParams(beam_width=1, max_tokens=1))
    here = set(inspect.signature(call).parameters)
    for name in CALLS[method]:
        if says[name] == "yes":
            assert name in here
            continue
        with pytest.raises(ConfigError, match=rf"{method}\(\) takes no argument '{name}': \w"):
            call(*given, **{name: [1]})
        assert call(*given, **{name: None})
    assert llm.generate([[1], [2]], priority=(0, 0))


def test_the_results(llm: LLM) -> None:
    says = table("Results")
    assert set(says) | {"finished"} == {*OF_REQUEST, *OF_COMPLETION}
    (result,) = llm.generate("a")
    for found, names in ((result, OF_REQUEST), (result.outputs[0], OF_COMPLETION)):
        for name in names:
            assert hasattr(found, name) == (says[name] == "yes"), name
    assert result.outputs[0].finished()


def test_conversations(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (plain,) = llm.chat(messages, GREEDY)
    assert plain.prompt == "user: hi\nassistant: "
    assert list(plain.prompt_token_ids) == llm.get_tokenizer().encode(plain.prompt)
    (tooled,) = llm.chat(messages, GREEDY, tools=[{"type": "function", "function": {"name": "f"}}])
    assert tooled.prompt is not None
    assert '"name": "f"' in tooled.prompt
    assert tooled.prompt.endswith(plain.prompt)
    (closed,) = llm.chat(messages, GREEDY, add_generation_prompt=False)
    assert closed.prompt == "user: hi\n"
    (other,) = llm.chat(
        messages,
        GREEDY,
        chat_template="{{ mood }}{{ messages[0].content }}",
        chat_template_kwargs={"mood": "glad "},
    )
    assert other.prompt == "glad hi"
    half = [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]
    with pytest.raises(PromptError, match="messages: half of a character at position 1"):
        llm.chat(messages, GREEDY, tools=half, chat_template="({{ tools[0].function.description }}")
    opened = [*messages, {"role": "assistant", "content": "It is"}]
    (going,) = llm.chat(opened, GREEDY, continue_final_message=True)
    assert going.prompt == "user: hi\nassistant: It is"
    (same,) = llm.generate({"messages": opened, "continue_final_message": True}, GREEDY)
    assert (same.prompt, same.token_ids) == (going.prompt, going.token_ids)
    given: TokensPrompt = {"prompt_token_ids": [1, 2], "prompt": "text of them"}
    assert llm.generate(given, GREEDY)[0].prompt == "text of them"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": ["f"]}, "tools: expected a list of"),
        ({"chat_template_kwargs": {"tokenize": 1}}, "'tokenize' is not a template's"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "contradict"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "chat template refuses this: no"),
    ],
)
def test_bad_conversations(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenleapError, match=message):
        llm.chat([{"role": "user", "content": "hi"}], **arguments)


def test_a_seed_for_all_requests() -> None:
    """Requests without a seed differ from each other, and a second run repeats them."""
    prompts = ["a", "a", "a"]
    runs = [[o.token_ids for o in tiny_llm(seed=seed).generate(prompts)] for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]
    assert len(set(runs[0])) == 3  # by accident alike with a chance below 1e-20


@pytest.mark.parametrize("seed", [-1, 1.5, "a"])
def test_a_seed_that_is_none(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed: "):
        LLM("none", seed=seed)


def test_prefixes_are_forgotten() -> None:
    with tiny_llm() as llm:
        prompt = "a" * 200
        first, again = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
        assert first.num_cached_tokens == 0 < again.num_cached_tokens
        assert llm.reset_prefix_cache()
        assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0


def test_the_end_of_a_model() -> None:
    with tiny_llm() as llm:
        engine = weakref.ref(llm.engine)
        stream = llm.stream("a", SamplingParams(max_tokens=50))
        next(stream)
    with pytest.raises(RequestError, match="the LLM was closed"):
        list(stream)
    with pytest.raises(TokenleapError, match="this LLM was closed: make a new one"):
        llm.generate("a")
    llm.close()
    assert repr(llm).endswith("closed)")
    del stream
    gc.collect()
    assert engine() is None


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
