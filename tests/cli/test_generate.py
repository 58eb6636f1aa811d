"""`generate`: the library's answer, as text, as JSON, as a trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.cli.conftest import Run, ascii_tokenizer, error_of
from tests.heads import published_medusa, tiny_head
from tests.tiny import tiny_model
from tests.tiny_seq2seq import tiny_seq2seq
from tests.vocabularies import bpe
from tokenleap import LLM, SamplingParams, Trace
from tokenleap.core.references import Source
from tokenleap.runtime.passes import Passes

MESSAGES = [{"role": "user", "content": "hello"}]
SHORT = ["--max-tokens", "20"]


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, speculative_config={"method": "ngram"})


def parsed(result: Result) -> dict[str, Any]:
    assert (result.exit_code, result.stderr) == (0, "")
    return dict(json.loads(result.stdout))


def test_a_pipe_gets_the_text_and_nothing_else(run: Run, tiny: Path, llm: LLM) -> None:
    (expected,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=20))
    result = run.done("generate", "hello", "-m", tiny, *SHORT)
    assert result.stdout == expected.text + "\n"
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("ngram_table", ["--num-speculative-tokens", 3]),
        ("draft_model", ["--draft-model", "TINY"]),
        ("eagle", ["--draft-model", "HEAD"]),
    ],
)
def test_the_drafter_changes_nothing(run: Run, tiny: Path, method: str, more: list[object]) -> None:
    given = ["generate", "hello", "-m", tiny, *SHORT, "--temperature", 1, "--seed", 3]
    folders = {"TINY": tiny, "HEAD": tiny_head(method, len(ascii_tokenizer().get_vocab()))}
    more = [folders.get(str(item), item) for item in more]
    expected = run(*given).stdout
    assert run(*given, "--method", method, *more).stdout == expected


def test_a_head_is_given_by_its_folder(run: Run, tiny: Path) -> None:
    given = ["generate", "hello", "-m", tiny, "--method", "eagle"]
    assert "add --draft-model with its folder" in error_of(run(*given))
    assert "there is no folder nowhere" in run.refused(*given, "--draft-model", "nowhere")


@pytest.mark.parametrize(
    "command", ["generate", "demo", pytest.param("bench", marks=pytest.mark.slow)]
)
def test_a_head_as_its_authors_publish_it(
    run: Run, tiny: Path, prompts: Path, tmp_path: Path, command: str
) -> None:
    more: dict[str, list[object]] = {
        "generate": ["hello", "--json"],
        "demo": ["--rounds", 1],
        "bench": [prompts, "--peers", "", "--rounds", 1, "--output", tmp_path / "results"],
    }
    head = published_medusa(tmp_path / "head", len(ascii_tokenizer().get_vocab()))
    given = ["-m", tiny, "--max-tokens", 8, "--method", "medusa", "--draft-model", head]
    run.done(command, *more[command], *given)
    if command == "bench":
        records = (tmp_path / "results/results.jsonl").read_text()
        assert '"type": "request", "contestant": "medusa"' in records


def test_json_has_every_field(run: Run, tiny: Path) -> None:
    llm = LLM(tiny, speculative_config={"method": "ngram"})  # that has learnt nothing yet, either
    (expected,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=20, logprobs=2))
    value = parsed(run("generate", "hello", "-m", tiny, *SHORT, "--json", "--logprobs", 2))
    assert value["text"] == expected.text
    assert value["token_ids"] == list(expected.token_ids)
    assert value["prompt"] == "hello"
    assert value["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert value["finish_reason"] == "length"
    assert value["model"] == str(tiny)
    assert value["dtype"] in ("bfloat16", "float32")
    assert value["speculative_config"] == llm.speculative_config.as_dict()
    assert value["runtime"] == llm.runtime
    assert value["bit_exact"] == llm.bit_exact
    assert "trace" not in value
    logprobs = value["logprobs"]
    assert len(logprobs) == 20
    assert {1, 2} <= {each["rank"] for each in logprobs[0].values()}
    metrics = value["metrics"]
    assert metrics["target_passes"] == expected.metrics.target_passes
    assert "outputs" not in value


def test_json_has_the_trace_if_it_is_wanted(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    value = parsed(run("generate", "hello", "-m", tiny, *SHORT, "--json", "--trace", file))
    assert value["trace"] == json.loads(file.read_text())


def test_json_names_the_controller_that_ran(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenleap.runtime.target.probe", lambda *_, **__: False)
    given = ["generate", "hello", "-m", tiny, *SHORT, "--method", "ngram", "--json"]
    value = parsed(run(*given))
    config = value["speculative_config"]
    assert config["controller"] == {"rule": "fixed"}
    assert value["bit_exact"] is False


def test_json_of_several_answers(run: Run, tiny: Path) -> None:
    several = ["--n", 3, "--temperature", 1, "--seed", 5]
    value = parsed(run("generate", "hello", "-m", tiny, *SHORT, *several, "--json"))
    outputs = value["outputs"]
    assert [output["index"] for output in outputs] == [0, 1, 2]
    assert outputs[0]["text"] == value["text"]
    assert len({output["text"] for output in outputs}) == 3
    text = run("generate", "hello", "-m", tiny, *SHORT, *several).stdout
    assert text == "\n".join(output["text"] + "\n" for output in outputs)


def test_trace_file(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text("old")
    for form in ([], ["--json"]):
        assert run("generate", "hello", "-m", tiny, *SHORT, "--trace", file, *form).exit_code == 0
        steps = list(Trace.load(file))
        assert sum(step.committed for step in steps) == 20
        assert all(p is not None for step in steps for p in step.p)
        assert list(tmp_path.iterdir()) == [file]
    shown = run.done("trace", file)
    assert "20 tokens in" in shown.stdout


def test_trace_into_a_device_leaves_the_device(run: Run, tiny: Path) -> None:
    assert run("generate", "hi", "-m", tiny, *SHORT, "--trace", "/dev/null").exit_code == 0
    assert Path("/dev/null").is_char_device()


def test_prompts_of_every_source(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello\n")
    common = ["-m", tiny, *SHORT]
    expected = run("generate", "hello", *common).stdout
    assert run("generate", "--file", file, *common).stdout == expected
    assert run("generate", *common, stdin="hello\n").stdout == expected
    assert run("generate", "-", *common, stdin="hello").stdout == expected
    assert run("generate", "hello", *common, stdin="not read").stdout == expected


def test_chat_template_or_not(run: Run, tiny: Path, tiny_without_template: Path) -> None:
    def tokens(*arguments: object) -> object:
        return parsed(run("generate", "hi", *SHORT, "--json", *arguments))["prompt_token_ids"]

    plain = tokens("-m", tiny_without_template)
    assert tokens("-m", tiny, "--no-chat") == plain
    assert tokens("-m", tiny) == tokens("-m", tiny, "--chat") != plain
    assert run.refused("generate", "hi", "-m", tiny_without_template, "--chat").endswith(
        "use --no-chat."
    )


@pytest.mark.usefixtures("colours")
def test_a_terminal_gets_colours_and_figures(run: Run, tiny: Path) -> None:
    long = ["--max-tokens", 40, "--allowed-token-ids", "40,41"]  # two words repeat themselves soon
    long += ["--controller", "fixed"]  # the origin of a token goes by the clock otherwise
    result = run("generate", "hello", "-m", tiny, *long)
    assert "\x1b[38;5;28m" in result.stdout
    assert "accepted" in result.stderr
    assert "passes" in result.stderr
    quiet = run("generate", "hello", "-m", tiny, *long, "--quiet")
    assert quiet.stdout == result.stdout
    assert quiet.stderr == ""
    several = run("generate", "hello", "-m", tiny, *long, "--n", 2, "--temperature", 1)
    assert "Answer 2 of 2" in several.stdout
    assert several.stderr.count("passes") == 2


@pytest.mark.model
def test_default_model(run: Run) -> None:
    value = parsed(run("generate", "What is the capital of France? Answer in one word.", "--json"))
    assert "Paris" in str(value["text"])
    assert value["finish_reason"] == "stop"
    assert value["model"] == "smollm2-135m"


def test_structured_outputs(run: Run, tiny: Path) -> None:
    form = json.dumps({"regex": "(ab|cd){3}!"})
    result = run.done(
        "generate", "hello", "-m", tiny, "--structured-outputs", form, "--method", "regex"
    )
    assert re.fullmatch("(ab|cd){3}!", result.stdout.strip())
    assert run.refused(
        "generate", "hello", "-m", tiny, "--structured-outputs", '{"regex": "(a"}'
    ).startswith("error: --structured-outputs: regex: not valid")


def test_quantized_weights(run: Run, tiny: Path, own_cache: Path) -> None:
    """Another output than that of the weights as they are, and the same with every drafter."""
    outputs = [
        run("generate", "hello", "-m", tiny, *SHORT, "--quantization", "int8", *more).stdout
        for more in ([], ["--method", "none"], ["--method", "ngram_table"])
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(outputs[0]) > 5
    assert "--quantization: must be one of auto" in run.refused(
        "generate", "hello", "-m", tiny, "--quantization", "int3"
    )


# A prompt per line, and encoder-decoders


@pytest.fixture(scope="session")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder-decoder that reads and writes ASCII."""
    folder, tokenizer = tmp_path_factory.mktemp("seq2seq"), ascii_tokenizer(chat_template=None)
    tiny_seq2seq(vocab_size=len(tokenizer.get_vocab())).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_line_per_source(run: Run, translator: Path, tmp_path: Path) -> None:
    llm = LLM(translator)
    sources = ["one", "two words", "three words now"]
    file = tmp_path / "sources.txt"
    file.write_text("".join(source + "\n" for source in sources))
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = llm.generate(sources, params)
    given = ["generate", "-m", translator, *SHORT, "--jsonl"]
    for more, stdin in (
        (["--file", file], None),
        (["--max-num-seqs", 2], "\r\n".join(sources)),
        (["--n", 2, "--temperature", 1, "--logprobs", 1, "-"], "\n".join(sources)),
    ):
        result = run.done(*given, *more, stdin=stdin)
        assert result.stderr == ""
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        assert [line["line"] for line in lines] == [1, 2, 3]
        assert [line["prompt"] for line in lines] == sources
        for line, output in zip(lines, expected, strict=True):
            assert line["prompt_token_ids"] == [2]
            assert line["encoder_prompt_token_ids"] == list(output.encoder_prompt_token_ids or ())
            assert len(line.get("outputs", "")) == (2 if "--n" in more else 0)
            assert (line["logprobs"] is None) == ("--n" not in more)
            assert ("--n" in more) or line["text"] == output.text


def test_one_source(run: Run, translator: Path) -> None:
    (expected,) = LLM(translator).generate("hi", SamplingParams(temperature=0, max_tokens=20))
    given = ["generate", "hi", "-m", translator, *SHORT]
    assert run(*given).stdout == expected.text + "\n"
    value = parsed(run(*given, "--json"))
    assert value["encoder_prompt_token_ids"] == list(expected.encoder_prompt_token_ids or ())
    assert value["text"] == expected.text


def test_lines_for_a_decoder_only_model(run: Run, tiny: Path, llm: LLM) -> None:
    (expected,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=20))
    result = run("generate", "-m", tiny, *SHORT, "--jsonl", stdin="hello\nhello")
    for line in map(json.loads, result.stdout.splitlines()):
        assert line["text"] == expected.text
        assert "encoder_prompt_token_ids" not in line


@pytest.mark.parametrize(
    ("options", "stdin", "message"),
    [
        (["--jsonl"], "a\n\nb\n", "line 2: the prompt is empty"),
        (["--jsonl"], "a\n" + "b" * 257, "line 2: the source has 257 tokens and the encoder takes"),
        (["--jsonl"], "", "the prompt is empty"),
        (["--jsonl", "hello"], "a", "--jsonl reads a prompt per line: give --file FILE, or pipe"),
        (["--jsonl", "--json"], "a", "--json prints one object, and several prompts have one"),
        (["--jsonl", "--trace", "t.json"], "a", "--trace describes one answer: leave out --jsonl"),
        (["--source-language", "xx"], "a", "this tokenizer has no tokens of languages"),
        (["--target-language", "de_DE", "--jsonl"], "a", "line 1: target_language: this tokenizer"),
    ],
)
def test_bad_lines(
    run: Run, translator: Path, options: list[str], stdin: str, message: str
) -> None:
    assert message in run.refused("generate", "-m", translator, *options, stdin=stdin)


def test_languages_need_an_encoder(run: Run, tiny: Path) -> None:
    result = run("generate", "hello", "-m", tiny, "--target-language", "de_DE")
    assert "this model has no encoder" in error_of(result)


def test_a_line_that_fails_leaves_the_others(
    run: Run, translator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Passes.encode

    def failing(passes: Passes, key: int, source: Source) -> None:
        if len(source) == 3:
            raise OSError("no disk")
        encode(passes, key, source)

    monkeypatch.setattr(Passes, "encode", failing)
    result = run("generate", "-m", translator, *SHORT, "--jsonl", stdin="one\nfour")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["error"] for line in lines] == ["OSError: no disk", None]
    assert result.exit_code == 1
    assert "1 of 2 lines ended with an error" in error_of(result)


def test_answers_may_quote_files(run: Run, tiny: Path, llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    (expected,) = llm.chat(MESSAGES, params)
    (quoted,) = llm.chat(MESSAGES, params, references=[expected.text])
    file, lists = tmp_path / "answer.txt", tmp_path / "lists.jsonl"
    file.write_text(expected.text + "\n")
    lists.write_text(f"[]\n[{json.dumps(expected.text)}]\n")
    fixed = ["--controller", "fixed"]
    given = ["generate", "-m", tiny, *SHORT, *fixed]

    def passes(value: dict[str, Any]) -> int:
        assert value["text"] == quoted.text == expected.text
        return int(value["metrics"]["target_passes"])

    alone = passes(parsed(run(*given, "hello", "--json")))
    assert passes(parsed(run(*given, "hello", "--json", "--reference", file))) < alone
    assert run(*given, "hello", "--reference", file).stdout == expected.text + "\n"
    run.done(*given, "hello", "--n", 2, "--temperature", 1, "--reference", file)
    lines = run(*given, "--jsonl", "--line-references", lists, stdin="hello\nhello")
    first, second = map(json.loads, lines.stdout.splitlines())
    assert passes(second) < passes(first) == alone
    lines = run(*given, "--jsonl", "--reference", file, stdin="hello\nhello")
    assert [passes(json.loads(line)) < alone for line in lines.stdout.splitlines()] == [True] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reference", "FILE", "--method", "none"], "method 'none' does not quote them"),
        (["--reference", "missing.txt"], "missing.txt: No such file"),
        (["--line-references", "FILE"], "--line-references is for several prompts"),
        (["--line-references", "FILE", "--jsonl"], "line 1 is not a JSON list of texts"),
        (["--line-references", "LISTS", "--jsonl"], "--line-references: 2 lines for 1 prompts"),
    ],
)
def test_bad_references(
    run: Run, tiny: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    files = {"FILE": tmp_path / "a.txt", "LISTS": tmp_path / "b.jsonl"}
    files["FILE"].write_text("some text")
    files["LISTS"].write_text("[]\n[]")
    given = [files.get(option, option) for option in options]
    result = run("generate", "-m", tiny, *SHORT, *given, stdin="hello")
    assert result.exit_code != 0
    assert message in error_of(result)


def test_beams(run: Run, tiny: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, beam_width=3, length_penalty=2)
    (expected,) = llm.chat(MESSAGES, params)
    given = ["generate", "hello", "-m", tiny, "--max-tokens", 8, "--beam-width", 3]
    value = parsed(run(*given, "--length-penalty", 2, "--json"))
    assert value["token_ids"] == list(expected.token_ids)
    beams = value["beams"]
    assert [beam["token_ids"] for beam in beams] == [
        list(beam.token_ids) for beam in expected.outputs[0].beams
    ]
    assert beams[0]["text"] == value["text"] == expected.text
    assert run(*given, "--length-penalty", 2).stdout == expected.text + "\n"


def test_what_beams_exclude_is_refused_by_its_flag(run: Run, tiny: Path) -> None:
    given = ["generate", "hello", "-m", tiny, "--beam-width", 3]
    problem = "--beam-width 3 searches and does not sample: set --temperature 0"
    assert problem in error_of(run(*given, "--temperature", 1))
    assert "--trace: a beam search has none" in error_of(run(*given, "--trace", "steps.json"))
    assert "or with --method none" in error_of(run(*given, "--method", "lookahead"))
    assert "--length-penalty is for beam search" in error_of(
        run("generate", "hello", "-m", tiny, "--length-penalty", 2)
    )


def test_a_prompt_is_scored(run: Run, tiny: Path, llm: LLM, tmp_path: Path) -> None:
    scored = SamplingParams(max_tokens=0, prompt_logprobs=1)
    (expected,) = llm.chat(MESSAGES, scored)
    given = ["generate", "-m", tiny, "--method", "none"]
    value = parsed(run(*given, "hello", "--json", "--max-tokens", 0, "--prompt-logprobs", 1))
    assert value["token_ids"] == []
    scores = value["prompt_logprobs"]
    assert expected.prompt_logprobs is not None
    assert len(scores) == len(expected.prompt_logprobs)
    assert scores[0] is None
    for found, known in zip(scores[1:], expected.prompt_logprobs[1:], strict=True):
        assert known is not None
        assert found == {str(token): vars(logprob) for token, logprob in known.items()}
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"prompt": "hello", "max_tokens": 0, "prompt_logprobs": 1}))
    assert parsed(run(*given, "--prompts-file", file))["prompt_logprobs"] == scores
    refused = run(*given, "hello", "--max-tokens", 0)
    assert "--max-tokens: must be at least 1, got 0" in error_of(refused)


def test_bad_words(run: Run, tiny: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    (plain,) = llm.chat(MESSAGES, params)
    first, second = (next(c for c in plain.text[at:] if c.isalnum()) for at in (0, 5))
    words = sorted({first, second})
    (expected,) = llm.chat(MESSAGES, params.model_copy(update={"bad_words": words}))
    options = [part for word in words for part in ("--bad-words", word)]
    given = ["generate", "-m", tiny, *SHORT]
    assert run(*given, "hello", *options).stdout == expected.text + "\n" != plain.text + "\n"


def test_the_models_own_sampling(run: Run, tiny: Path, llm: LLM, tmp_path: Path) -> None:
    """It holds for flags that are not given; the shell's own defaults, where it has none."""
    own = {"temperature": 0.8, "top_k": 5, "max_new_tokens": 6, "no_repeat_ngram_size": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    command = ("generate", "Hi", "--model", tiny, "--json", "--seed", 3)
    chosen = (*command, "--generation-config", tmp_path)
    expected = LLM(tiny, generation_config=tmp_path)
    prompt: Any = [{"role": "user", "content": "Hi"}]
    flags: list[Any]
    params: dict[str, Any]
    for flags, params in (
        ([], {"seed": 3}),
        (["--top-k", 2], {"seed": 3, "top_k": 2}),
        (["--temperature", 0, "--max-tokens", 9], {"temperature": 0, "max_tokens": 9}),
    ):
        (output,) = expected.generate([prompt], params)
        assert parsed(run(*chosen, *flags))["token_ids"] == list(output.token_ids)
        assert len(set(output.token_ids)) == len(output.token_ids)  # no 1-gram comes twice
    (output,) = llm.generate([prompt], {"temperature": 0, "max_tokens": 128})
    assert parsed(run(*command))["token_ids"] == list(output.token_ids)
    assert error_of(run(*command, "--top-k", 2)).endswith("add --temperature 1")
    assert "must be 'auto', 'none'" in error_of(run(*command, "--generation-config", "nowhere"))


# What the answer will mostly repeat


def test_a_prediction_is_drafted_first(run: Run, tiny: Path, tmp_path: Path) -> None:
    given = ("generate", "-m", tiny, "--max-tokens", 24, "--method", "prediction", "hello")
    fixed = ("--controller", "fixed")
    alone = parsed(run(*given, *fixed, "--json"))
    file = tmp_path / "expected.txt"
    file.write_text(alone["text"])
    predicted = parsed(run(*given, *fixed, "--json", "--prediction-file", file))
    assert predicted["token_ids"] == alone["token_ids"]
    assert predicted["metrics"]["target_passes"] < alone["metrics"]["target_passes"]
    assert predicted["metrics"]["accepted_prediction_tokens"] > 0
    assert run(*given, *fixed, "--prediction-file", file).stdout == alone["text"] + "\n"
    assert "missing.txt: No such file" in error_of(run(*given, "--prediction-file", "missing.txt"))


def test_lines_have_predictions_of_their_own(run: Run, tiny: Path, tmp_path: Path) -> None:
    given = ("generate", "-m", tiny, "--max-tokens", 24, "--method", "prediction")
    fixed = ("--controller", "fixed")
    (alone,) = map(json.loads, run(*given, *fixed, "--jsonl", stdin="hello").stdout.splitlines())
    text = alone["text"]
    lines = [{"prompt": "hello"}, {"prompt": "hello", "prediction": text}, {"prompt": "hello"}]
    lines[2]["prediction"] = ""  # none
    shared = tmp_path / "expected.txt"
    shared.write_text(text)
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    for more, predicted in (((), [1]), (("--prediction-file", shared), [0, 1])):
        found = run(*given, *fixed, "--prompts-file", file, *more).stdout.splitlines()
        for place, line in enumerate(map(json.loads, found)):
            assert line["token_ids"] == alone["token_ids"]
            assert (line["metrics"]["accepted_prediction_tokens"] > 0) == (place in predicted)
    file.write_text('{"prompt": "hello", "prediction": ["a"]}')
    refused = run(*given, "--prompts-file", file)
    assert "prediction must be a text" in error_of(refused)


# A draft model with other tokens than the target's


CALL = ("generate", "the cat", "--no-chat", "--max-tokens", 6)


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model with most of the target's characters, and words besides."""
    folder = tmp_path_factory.mktemp("other")
    tokenizer = bpe()
    tiny_model(vocab_size=len(tokenizer.get_vocab())).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_overlap_is_told_once_the_models_are_loaded(run: Run, tiny: Path, unlike: Path) -> None:
    plain = run(*CALL, "--model", tiny, "--method", "none")
    result = run.done(*CALL, "--model", tiny, "--draft-model", unlike)
    assert result.stdout == plain.stdout
    size = len(bpe().get_vocab())
    told = f"55 of the target's 97 tokens are among the draft model's {size} (vocabulary 'inter"
    assert sum(told in line for line in result.stderr.splitlines()) == 1


def test_not_where_the_tokens_are_the_same_or_quiet_is_wanted(
    run: Run, tiny: Path, unlike: Path
) -> None:
    assert "tokens are among" not in run(*CALL, "--model", tiny, "--draft-model", tiny).stderr
    quiet = run.done(*CALL, "--model", tiny, "--draft-model", unlike, "--quiet")
    assert quiet.stderr == ""


def test_a_way_that_is_refused(run: Run, tiny: Path, unlike: Path) -> None:
    result = run(
        *(*CALL, "--model", tiny, "--draft-model", unlike),
        *("--speculative-config", '{"vocabulary": "same"}'),
    )
    assert "set vocabulary to 'intersection' or 'text'" in error_of(result)
