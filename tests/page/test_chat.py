"""The page of a server in a browser: a chat with a tiny model on a real server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from itertools import count
from threading import Event
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Request, Route, expect

from tests.page.conftest import Open, shot
from tests.page.test_viewer import contrast
from tests.serve.support import Served, served, tiny_llm, tiny_parts
from tokenleap import LLM

ANSWERS = "**/v1/chat/completions"
ENDED = re.compile("finished|most tokens reached")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Its draft model is the target itself, so every draft is accepted."""
    twin = tiny_llm(speculative_config=None)
    config = {"method": "draft_model", "model": twin, "num_speculative_tokens": 3}
    llm = tiny_llm(speculative_config={**config, "controller": "fixed"})
    with served(llm, max_waiting=0) as found:
        yield found


@pytest.fixture
def page(server: Served, open_page: Open) -> Page:
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    expect(page.locator("#model")).to_have_text("tiny")
    return page


def copied(page: Page, button: Locator) -> str:
    """What a button copies."""
    expect(button).to_have_text("Copy")
    button.click()
    expect(button).to_have_text("Copied")
    return str(page.evaluate("navigator.clipboard.readText()"))


def configure(page: Page, **values: object) -> None:
    page.locator("summary").click()
    for name, value in values.items():
        page.locator(f"[name={name}]").fill(str(value))
    page.locator("summary").click()


def ask(page: Page, text: str = "one two one two one two") -> Locator:
    """Send a message; the last answer."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    return page.locator(".answer").last


def wait_until_idle(server: Served) -> None:
    for _ in range(600):
        if server.state.open_sequences == 0:
            return
        server.http.get("/health")
        time.sleep(0.05)
    raise AssertionError("a request is still open")


def test_an_answer_with_its_colours_its_tally_and_its_trace(page: Page, server: Served) -> None:
    configure(page, max_tokens=40, temperature=0)
    answer = ask(page)
    expect(answer.locator(".state")).to_have_text(ENDED)
    content = answer.locator(".text")
    direct = server.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "one two one two one two"}],
        max_tokens=40,
        temperature=0,
    ).json()
    text, size = direct["choices"][0]["message"]["content"], direct["usage"]["completion_tokens"]
    assert copied(page, answer.locator(".foot .copy")) == text
    kinds = content.locator(".token").evaluate_all("all => all.map(t => t.className)")
    assert kinds[:8] == ([*["token draft by-model"] * 3, "token bonus"]) * 2
    counts = [int(n) for n in re.findall(r"\d+", answer.locator(".legend").inner_text())]
    assert sum(counts) == size > 8
    tally = answer.locator(".tally").inner_text()
    figures = (
        r"tokens/s\n[\d.]+\ntokens per pass\n([\d.]+)\nagainst plain\n≈ [\d.]+ .?s (saved|lost)"
    )
    found = re.fullmatch(figures, tally)
    assert found, tally
    per_pass = float(found[1])
    assert per_pass > 3
    shot(page, "chat")

    answer.get_by_role("link", name="Trace").click()
    expect(page.locator("#trace-title")).to_have_text("Answer 1")
    traced = page.locator(".output").evaluate("element => element.textContent")
    assert traced.removesuffix("<|end|>") == text, "a trace shows special tokens, too"
    assert f"{size}\n{round(size / per_pass)} passes" in page.locator(".tiles").inner_text()
    page.keyboard.press("End")
    expect(page.locator(".side tbody tr")).to_have_count(5)
    shot(page, "chat-trace", whole=True)
    page.keyboard.press("Escape")
    expect(answer).to_be_visible()

    answer.get_by_role("button", name="Compare with plain").click()
    expect(page.locator(".verdict")).to_have_text(
        re.compile(r"Same text; speculative: [\d.]+ times the speed")
    )
    plain = page.get_by_role("region", name="Plain")
    assert copied(page, plain.locator(".foot .copy")) == text
    assert plain.locator(".token:not(.plain)").count() == 0
    expect(plain.locator(".tally")).not_to_contain_text("against plain")
    shot(page, "chat-compared")

    again = ask(page, "and then")
    expect(again.locator(".state")).to_have_text(ENDED)
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_text("Ask something")).to_be_visible()
    expect(page.locator(".answer")).to_have_count(0)


@pytest.mark.parametrize("share", [False, True])
def test_a_repeated_prompt_is_no_advertisement(open_page: Open, share: bool) -> None:
    config = {"method": "suffix", "controller": "fixed"}
    with served(tiny_llm(speculative_config=config), share_drafts=share) as running:
        page = open_page(running.url)
        configure(page, max_tokens=40, temperature=1, seed=3)
        for repeated in (False, share):
            answer = ask(page)
            expect(answer.locator(".state")).to_have_text(ENDED)
            note = answer.get_by_text(re.compile(r"Repeated prompt: \d+ of 40 tokens"))
            expect(note).to_be_visible() if repeated else expect(note).to_be_hidden()
            page.get_by_role("button", name="New chat").click()
        page.close()


def test_an_answer_of_a_server_without_traces(open_page: Open) -> None:
    with served(traces=False) as running:
        page = open_page(running.url)
        expect(page.locator("#model")).to_have_text("tiny")
        answer = ask(page)
        expect(answer.locator(".state")).to_have_text(ENDED)
        expect(answer.locator(".tally")).to_contain_text("tokens per pass")
        expect(answer.get_by_role("link", name="Trace")).to_have_count(0)
        page.close()


def sent_by(page: Page) -> list[dict[str, Any]]:
    """The bodies of the requests that it sends from now on."""
    bodies: list[dict[str, Any]] = []

    def asked(request: Request) -> None:
        if request.method == "POST":
            bodies.append(json.loads(request.post_data or ""))

    page.on("request", asked)
    return bodies


def test_the_conversation_and_the_settings_are_sent(page: Page) -> None:
    bodies = sent_by(page)
    configure(page, max_tokens=4, temperature=0.5, top_k=7, seed=3, system="Be brief.")
    expect(ask(page, "first").locator(".state")).to_have_text(ENDED)
    expect(ask(page, "second").locator(".state")).to_have_text(ENDED)
    first, second = bodies
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
    ]
    sent = {"max_tokens": 4, "temperature": 0.5, "top_k": 7, "seed": 3, "model": "tiny"}
    assert sent.items() <= first.items()
    assert "top_p" not in first
    assert [message["role"] for message in second["messages"]] == [
        *("system", "user", "assistant", "user")
    ]
    shown = page.get_by_role("group", name="System prompt")
    expect(shown).to_contain_text("Be brief.")
    page.get_by_role("button", name="Theme: auto. Change it.").click()
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.locator("summary").click()
    expect(page.locator("[name=top_k]")).to_have_value("7")
    page.locator("[name=top_k]").fill("0.5")
    expect(page.locator("details [role=status]")).to_contain_text("Top k: ")
    page.locator("summary").click()
    ask(page, "third")
    expect(page.get_by_role("alert")).to_contain_text("Top k: ")
    assert len(bodies) == 2


def held(server: Served, monkeypatch: pytest.MonkeyPatch, steps: int) -> Event:
    """Hold the engine after these steps until the event is set."""
    verify, left, go_on = server.llm.engine.target.verify, count(steps, -1), Event()

    def waiting(*arguments: Any, **options: Any) -> Any:
        if next(left) <= 0:
            go_on.wait(120)
        return verify(*arguments, **options)

    monkeypatch.setattr(server.llm.engine.target, "verify", waiting)
    return go_on


@pytest.mark.parametrize("by", ["button", "key"])
def test_stop(page: Page, server: Served, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that has come stays, with its trace, and the engine is free after its step."""
    configure(page, max_tokens=900, seed=5)
    go_on = held(server, monkeypatch, 3)
    answer = ask(page)
    expect(answer.locator(".token")).to_have_count(12)
    shot(page, "chat-streaming")
    expect(answer.locator(".state")).to_have_text("generating …")
    with page.expect_response("**/cancel") as told:
        if by == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
    assert told.value.status == 204
    go_on.set()  # the step that runs
    expect(answer.locator(".state")).to_have_text("stopped")
    expect(answer.locator(".failure")).to_have_count(0)
    wait_until_idle(server)
    expect(answer.get_by_role("link", name="Trace")).to_be_visible()


def test_escape_leaves_a_trace_before_it_stops_an_answer(
    page: Page, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(page, max_tokens=4, seed=5)
    expect(ask(page).locator(".state")).to_have_text(ENDED)
    configure(page, max_tokens=900)
    go_on = held(server, monkeypatch, 3)
    answer = ask(page)
    expect(answer.locator(".state")).to_have_text("generating …")
    page.evaluate("location.hash = '#trace-1'")
    expect(page.locator("#trace-title")).to_be_visible()
    page.keyboard.press("Escape")
    expect(answer.locator(".state")).to_be_visible()
    expect(answer.locator(".state")).to_have_text("generating …")
    with page.expect_response("**/cancel"):
        page.keyboard.press("Escape")
    go_on.set()
    expect(answer.locator(".state")).to_have_text("stopped")
    wait_until_idle(server)


def test_what_goes_wrong_is_said_and_can_be_tried_again(page: Page, server: Served) -> None:
    configure(page, max_tokens=4, top_p=0)
    answer = ask(page)
    expect(answer.locator(".failure")).to_contain_text("The server refused the request: ")
    expect(answer.locator(".failure")).to_contain_text("top_p")
    configure(page, top_p=1)

    room, server.state.open_sequences = server.state.open_sequences, server.state.capacity
    answer = ask(page)
    failure = answer.locator(".failure")
    expect(failure).to_contain_text("The server is busy: ")
    expect(failure).to_contain_text("Try again in 1 s.")
    # The first one would lose this turn.
    expect(page.get_by_role("button", name="Try again")).to_have_count(1)
    server.state.open_sequences = room
    answer.get_by_role("button", name="Try again").click()
    answer = page.locator(".answer").last
    expect(answer.locator(".state")).to_have_text(ENDED)
    expect(answer.locator(".failure")).to_have_count(0)

    page.context.set_offline(True)
    answer = ask(page)
    expect(answer.locator(".failure")).to_have_text(
        "The server cannot be reached. Is it still running?"
    )
    shot(page, "chat-server-gone")
    ask(page, "instead")
    expect(page.get_by_text("The next message will replace this one.")).to_have_count(1)
    page.context.set_offline(False)
    bodies = sent_by(page)
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".answer").last.locator(".state")).to_have_text(ENDED)
    shown = page.locator(".question > .text").all_inner_texts()
    sent = [each["content"] for each in bodies[0]["messages"] if each["role"] == "user"]
    assert sent == shown == ["one two one two one two", "instead"]


def stream(*texts: str, origin: str = "plain", ends: bool = True) -> str:
    """A response with one token per text."""
    parts = []
    for text in texts:
        token = {"id": 1, "text": text, "origin": origin}
        choice = {"index": 0, "finish_reason": None, "tokenleap": {"tokens": [token]}}
        parts.append(f"data: {json.dumps({'choices': [choice]})}\n\n")
    return "".join([*parts, *(["data: [DONE]\n\n"] if ends else [])])


ATTACK = '</script><img src=x onerror="document.title=1"><script>document.title=1</script>'


def test_a_stream_that_breaks_or_fails_and_text_that_is_markup(page: Page) -> None:
    error = {"error": {"message": "the request failed: no room", "type": "server_error"}}
    failed = f"{stream('half', ends=False)}data: {json.dumps(error)}\n\n"
    cases = {
        stream("half", ends=False): "The connection broke before the end of the answer.",
        failed: "the request failed: no room",
    }

    def answered(body: str, status: int = 200) -> None:
        def fulfil(route: Route) -> None:
            route.fulfill(status=status, body=body, content_type="text/event-stream")

        page.unroute(ANSWERS)
        page.route(ANSWERS, fulfil)

    for body, told in cases.items():
        answered(body)
        answer = ask(page)
        expect(answer.locator(".failure")).to_have_text(told)
        expect(answer.locator(".text")).to_contain_text("half")
        expect(answer.get_by_role("button", name="Try again")).to_be_visible()
    answered(stream(ATTACK, "é", "\u202e"))
    answer = ask(page, ATTACK)
    expect(answer.locator(".text")).to_have_text(f"{ATTACK}é\u202e")
    assert page.locator("img").count() == 0
    assert page.title() == "Tokenleap"
    answered(json.dumps({"error": {"message": "an API key is needed"}}), 401)
    answer = ask(page)
    expect(answer.locator(".failure")).to_have_text(
        "The server wants one of its API keys: enter it in the settings."
    )
    expect(page.locator("[name=key]")).to_be_focused()
    kept = page.evaluate("localStorage.getItem('tokenleap-settings')")
    page.locator("[name=key]").fill("secret")
    assert page.evaluate("localStorage.getItem('tokenleap-settings')") == kept, "it is not kept"


def answered_with(page: Page, *texts: str, origin: str = "plain") -> None:
    """Let the next answers be these."""

    def fulfil(route: Route) -> None:
        route.fulfill(body=stream(*texts, origin=origin), content_type="text/event-stream")

    page.unroute(ANSWERS)
    page.route(ANSWERS, fulfil)


MARKDOWN = """# A TITLE of it

some **BOLD** and *ITALIC* with `code SPAN`, <b>no TAG</b> &amp; [a LINK](https://example.org/LINK)
again some **BOLD**

```python
def ONE():
    return "**two**"
```

1. first
   - NESTED
     ```
     CODE in it
     ```
2. second

| A | bb |
|---|--:|
| A | x<br>Y |

> QUOTED
> twice QUOTED

![PICTURE](http://example.org/x.png) [SCRIPT](javascript:alert(1))
"""


def test_markdown_keeps_the_origins(page: Page) -> None:
    """Capitals are drafted here and all else is a bonus, so a token out of place is seen."""
    tokens = re.findall(r"[A-Z]+|[^A-Z]", MARKDOWN)
    parts = [stream(t, origin="draft" if t.isupper() else "bonus", ends=False) for t in tokens]
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.route(
        ANSWERS,
        lambda route: route.fulfill(
            body="".join([*parts, "data: [DONE]\n\n"]), content_type="text/event-stream"
        ),
    )
    answer = ask(page)
    expect(answer.locator(".state")).to_have_text("")
    text = answer.locator(".markdown")
    spans = text.locator(".token").evaluate_all(
        "all => all.map(t => [t.textContent, t.classList[1]])"
    )
    drafted = [piece for piece, kind in spans if kind == "draft"]
    assert all(piece.isupper() for piece in drafted)
    assert not any(re.search("[A-Z]", piece) for piece, kind in spans if kind == "bonus")
    assert len(drafted) == len(re.findall(r"[A-Z]+", MARKDOWN)) - 1, "all but the link's address"

    expect(text.locator("h3")).to_have_text("A TITLE of it")
    expect(text.locator("strong").first).to_have_text("BOLD")
    expect(text.locator("p").first).to_contain_text("<b>no TAG</b> & a LINK\nagain some BOLD")
    expect(text.locator("ol > li > ul > li")).to_contain_text("NESTED")
    assert text.locator("tr").all_inner_texts() == ["A\tbb", "A\tx\nY"]
    code = text.locator(".code").first
    assert "mono" in code.locator("code").evaluate("one => getComputedStyle(one).fontFamily")
    assert copied(page, code.get_by_role("button")) == 'def ONE():\n    return "**two**"'
    assert copied(page, answer.locator(".foot .copy")) == MARKDOWN
    links = text.locator("a").evaluate_all("all => all.map(a => [a.href, a.rel, a.textContent])")
    rel = "noopener noreferrer nofollow"
    assert links == [
        ["https://example.org/LINK", rel, "a LINK"],
        ["http://example.org/x.png", rel, "image: PICTURE"],
    ]
    assert text.locator("img, b, script").count() == 0
    assert [url for url in asked if "example" in url] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    for selector in (".code-bar span", ".question button", ".answer .term", ".markdown a", "th"):
        assert contrast(page, selector) >= 4.5, selector

    colour = "one => getComputedStyle(one).backgroundColor"
    token = text.locator(".token.draft").first
    assert token.evaluate(colour) != "rgba(0, 0, 0, 0)"
    page.get_by_label("Origins").uncheck()
    expect(answer.locator(".legend")).to_be_hidden()
    page.reload()
    expect(page.get_by_label("Origins")).not_to_be_checked()
    assert token.evaluate(colour) == "rgba(0, 0, 0, 0)"


def test_markdown_that_nests_without_end(page: Page) -> None:
    for text in (">" * 40_000, "> " * 1_000, "1. " * 1_000, "!" * 60_000):
        answered_with(page, text, "the end")
        expect(ask(page).locator(".markdown")).to_contain_text("the end")


READ = """async (cost) => {
  const { MarkdownView } = await import("/page/markdown.js");
  const { Lexer } = await import("/page/marked.esm.js");
  const { lex } = Lexer.prototype;
  const [sizes, now] = [[], performance.now];
  let clock = 0;
  performance.now = () => clock;
  Lexer.prototype.lex = function (text) {
    sizes.push(text.length);
    clock += cost * text.length ** 2;
    return lex.call(this, text);
  };
  const view = new MarkdownView();
  view.show([{ text: "words *and* ".repeat(1000), origin: "plain" }]);
  Lexer.prototype.lex = lex;
  performance.now = now;
  return [sizes, view.root.textContent.length, view.root.querySelectorAll("em").length];
}"""


def test_markdown_that_takes_long_to_read_is_found_in_its_first_piece(page: Page) -> None:
    assert page.evaluate(READ, 2e-5) == [[4000], 12_000, 0]
    assert page.evaluate(READ, 0) == [[4000, 4000, 12_000], 10_000, 1000]


def test_edit_and_regenerate(page: Page) -> None:
    bodies = sent_by(page)

    def sent() -> list[str]:
        return [each["content"] for each in bodies[-1]["messages"]]

    answered_with(page, "first")
    ask(page, "one")
    answered_with(page, "second")
    ask(page, "two")
    expect(page.locator(".answer .text")).to_have_text(["first", "second"])
    answered_with(page, "other")
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer .text")).to_have_text(["first", "other"])
    assert sent() == ["one", "first", "two"]

    page.get_by_role("button", name="Edit").first.click()
    edited = page.get_by_label("Edited message")
    expect(edited).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".question > .text")).to_have_text(["one", "two"])
    page.get_by_role("button", name="Edit").first.click()
    edited.fill("uno")
    page.keyboard.press("Enter")
    expect(page.locator(".question > .text")).to_have_text(["uno"])
    expect(page.locator(".answer .text")).to_have_text(["other"])
    assert sent() == ["uno"]


def test_a_chat_survives_a_reload_until_it_is_deleted(page: Page) -> None:
    answered_with(page, "**kept**", origin="draft")
    ask(page, "one")
    expect(page.locator(".answer strong")).to_have_text("kept")
    page.get_by_label("Origins").check()
    page.reload()
    expect(page.locator(".question > .text")).to_have_text(["one"])
    expect(page.locator(".answer strong .token.draft")).to_have_text("kept")
    bodies = sent_by(page)
    ask(page, "two")
    expect(page.locator(".answer strong")).to_have_text(["kept", "kept"])
    assert [each["content"] for each in bodies[0]["messages"]] == ["one", "**kept**", "two"]
    page.locator(".log").evaluate("log => (log.style.display = 'none')")  # quicker
    answered_with(page, "x" * 1_200_000, "y" * 1_200_000)
    ask(page, "three")
    expect(page.get_by_role("alert").first).to_contain_text("too long to be kept")
    page.reload()
    expect(page.get_by_text("Ask something")).to_be_visible()

    answered_with(page, "again")
    ask(page, "one")
    expect(page.locator(".answer .text")).to_have_text("again")
    configure(page, system="Be brief.")
    page.locator("summary").click()
    page.get_by_role("button", name="Delete chat and settings").click()
    page.reload()
    expect(page.get_by_text("Ask something")).to_be_visible()
    expect(page.locator("[name=system]")).to_have_value("")
    assert page.evaluate("sessionStorage.length") == 0


def test_methods_and_the_defaults_of_the_model(open_page: Open) -> None:
    model, tokenizer = tiny_parts()
    model.generation_config.temperature = 0.25
    with served(LLM(model, tokenizer=tokenizer)) as running:
        page = open_page(running.url)
        bodies = sent_by(page)
        page.locator("summary").click()
        expect(page.locator("[name=temperature]")).to_have_attribute(
            "placeholder", "0.25 (the model's)"
        )
        expect(page.locator("[name=num_speculative_tokens]")).to_be_disabled()
        page.locator("[name=max_tokens]").fill("8")
        expect(ask(page).locator(".state")).to_have_text(ENDED)
        assert not {"temperature", "speculative_config"} & set(bodies[0])
        page.get_by_label("Method of speculation").select_option("suffix")
        page.locator("[name=num_speculative_tokens]").fill("3")
        answer = ask(page)
        expect(answer.locator(".state")).to_have_text(ENDED)
        expect(answer.locator(".row")).to_contain_text("suffix")
        config = {"method": "suffix", "num_speculative_tokens": 3}
        assert bodies[1]["speculative_config"] == config
        page.reload()
        expect(page.get_by_label("Method of speculation")).to_have_value("suffix")
        page.close()


def test_one_of_several_models_is_chosen(page: Page) -> None:
    """Of one that is not loaded, nothing else is known yet."""
    loaded = {"id": "a", "root": "a", "default_sampling_params": {"top_k": 7}, "traces": True}
    loaded |= {"speculation": {"method": "ngram", "methods": {"none": "no speculation"}}}
    listed = [loaded, {"id": "b", "root": "b", "traces": True}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": listed}))
    page.reload()
    bodies = sent_by(page)
    answered_with(page, "yes")
    ask(page)
    expect(page.locator(".answer .text")).to_have_text("yes")
    page.locator("summary").click()
    expect(page.locator("[name=top_k]")).to_have_attribute("placeholder", "7 (the model's)")
    page.locator("[name=model]").select_option("b")
    expect(page.locator("#model")).to_have_text("b")
    expect(page.locator("[name=top_k]")).to_have_attribute("placeholder", "off")
    page.reload()
    expect(page.locator("#model")).to_have_text("b")
    ask(page)
    expect(page.locator(".answer .text")).to_have_text(["yes", "yes"])
    first, second = bodies
    assert (first["model"], first["temperature"]) == ("a", 0)
    assert (second["model"], second["max_tokens"]) == ("b", 512)
    assert "temperature" not in second


def test_words_are_explained_where_they_stand(page: Page) -> None:
    configure(page, max_tokens=8)
    answer = ask(page)
    answer.get_by_role("link", name="Trace").click()
    for place, word, says in (
        (".legend", "bonus", "accepted a whole draft"),
        (".legend", "correction", "that it rejected"),
        (".side thead", "p", "the probability of a token under the target"),
        (".side thead", "q", "that the drafter gave"),
        (".pair", "gamma", "the draft length"),
    ):
        page.locator("#viewer").locator(place).get_by_role("button", name=word, exact=True).click()
        expect(page.locator(":popover-open")).to_contain_text(says)
        page.keyboard.press("Escape")
        expect(page.locator(":popover-open")).to_have_count(0)
    expect(page.locator("#trace-title")).to_be_visible()


def test_keys_dark_and_narrow(server: Served, open_page: Open) -> None:
    options: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark"}
    page = open_page(server.url, **options)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("a?b")
    page.keyboard.press("Shift+Enter")
    expect(page.get_by_label("Message", exact=True)).to_have_value("a?b\n")
    expect(page.get_by_role("dialog")).to_have_count(0)
    configure(page, max_tokens=60)
    page.locator("h1 a").focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    answer = ask(page)
    expect(answer.get_by_role("link", name="Trace")).to_be_visible()
    answer.get_by_role("button", name="Compare with plain").click()
    expect(page.locator(".verdict")).to_be_visible()
    for selector in (".question button", ".answer .term", ".links button", ".switch"):
        assert contrast(page, selector) >= 4.5, selector
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    expect(page.locator(".verdict")).to_be_in_viewport()  # the page follows what is written
    shot(page, "chat-narrow-dark")


def test_a_trace_from_disk(page: Page, server: Served) -> None:
    answer = server.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "one"}],
        max_tokens=5,
        tokenleap={"trace": True},
    ).json()["choices"][0]
    page.get_by_role("button", name="Open a trace").wait_for()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Open a trace").click()
    content = json.dumps(answer["tokenleap"]["trace"]).encode()
    chooser.value.set_files(
        {"name": "mine.json", "mimeType": "application/json", "buffer": content}
    )
    expect(page.locator("#trace-title")).to_have_text("mine")
    traced = page.locator(".output").evaluate("element => element.textContent")
    assert traced.removesuffix("<|end|>") == answer["message"]["content"]
    page.go_back()
    expect(page.get_by_label("Message", exact=True)).to_be_visible()


def test_files_and_headers(server: Served) -> None:
    """Nothing but the page's own files; a browser asks again with a tag."""
    index = server.http.get("/")
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    policy = index.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    names = re.findall(r'(?:src|href)="(page/[^"]+)"', index.text)
    assert len(names) == 2
    library = server.http.get("/page/marked.esm.js")  # it names its source
    assert library.text.startswith("/**\n * marked v18.2.1 ")
    assert server.http.get("/page/marked.LICENSE.txt").text.startswith("# License information")
    for name in [*names, "page/api.js"]:
        found = server.http.get(f"/{name}")
        assert found.status_code == 200
        assert "http:" not in found.text.replace("http://www.w3.org/2000/svg", "")
        assert "https:" not in found.text
        tag = found.headers["etag"]
        again = server.http.get(f"/{name}", headers={"If-None-Match": tag})
        assert (again.status_code, again.content) == (304, b"")
    for absent in ("page/", "page/trace.html", "page/../page.py", "page/%2e%2e/page.py"):
        assert server.http.get(f"/{absent}").status_code == 404
    assert server.http.head("/").status_code == 200
    assert "/page" not in json.dumps(server.http.get("/openapi.json").json()["paths"])
