"""The trace viewer in a browser: `tokenleap trace FILE --html OUT`, opened from disk."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests import traces
from tests.page.conftest import Open, shot
from tokenleap import Origin, StepTrace, Trace
from tokenleap.cli.trace import html
from tokenleap.trace import Candidate

PIECES = {**traces.PIECES, 7: "A"}


def step(drafted: tuple[int, ...], accepted: tuple[int, ...], **fields: Any) -> StepTrace:
    times = {
        "draft_seconds": 0.001 * len(drafted),
        "verify_seconds": 0.01 + 0.001 * len(drafted),
        "accept_seconds": 0.001,
    }
    return traces.step(drafted, accepted, **{**times, **fields})


PLAIN = step((), (), token=7, origin=Origin.PLAIN)
CORRECTED = step(
    (1, 2, 3, 4),
    (0, 1),
    rejected=(2,),
    origin=Origin.CORRECTION,
    reason="the target drew another token",
    sources=("model", "model", "lookup", "lookup"),
    candidates=(
        (Candidate(1, 0.9, 1.0, 1.0),),
        (Candidate(2, 0.8, 1.0, 1.0),),
        (Candidate(5, 0.6, 1.0, 0.0), Candidate(3, 0.25, 0.0, 1.0)),
        (),
        (),
    ),
)
BONUS = step((1, 2), (0, 1), token=4)
TREE = step(
    (1, 2, 3, 5, 4, 6),
    (0, 3),
    parents=(-1, 0, 1, 0, 3, 3),
    rejected=(1, 4, 5),
    origin=Origin.CORRECTION,
    reason="p=0 against q=0.5",
)
CUT = replace(BONUS, committed=1)
STEPS = [PLAIN, CORRECTED, BONUS, TREE, CUT]
FATES = [
    ["root", "plain"],
    ["root", "accepted", "accepted", "rejected", "unreached", "correction"],
    ["root", "accepted", "accepted", "bonus"],
    ["root", "accepted", "rejected", "unreached", "accepted", "rejected", "rejected", "correction"],
    ["root", "accepted", "unreached"],
]
WHY = [
    "Nothing was drafted: the target's own token.",
    "2 of 4 levels accepted. “·sat” was rejected at p .500 and q 1 (the target drew another "
    "token). The target continues with “·dog”.",
    "2 of 2 levels accepted. Every token of the path passed, so the pass gives “↵” as well.",
    "2 of 3 levels accepted. “↵” was rejected at p .500 and q 1, then “⇥” (last: p=0 against "
    "q=0.5). The target continues with “·dog”.",
    "1 of 2 levels accepted. The output ended within this step.",
]


def page_of(trace: Trace, folder: Path, name: str = "steps") -> str:
    file = folder / "trace.html"
    file.write_text(html(trace, name))
    return file.as_uri()


@pytest.fixture
def page(open_page: Open, tmp_path: Path) -> Page:
    return open_page(page_of(Trace(STEPS, PIECES, prefill_seconds=0.02), tmp_path))


def chosen(page: Page) -> int:
    """The number of the step that is shown."""
    return int(page.locator(".count").inner_text().split("/")[0])


def test_every_step_with_its_tree_and_why_it_ended(page: Page) -> None:
    expect(page.locator(".output")).to_have_text("A the cat dog the cat\n the dog dog the")
    assert chosen(page) == 2, "the first step with a draft"
    page.keyboard.press("Home")
    top = page.locator(".pair").bounding_box()
    for number, (fates, why) in enumerate(zip(FATES, WHY, strict=True), 1):
        assert chosen(page) == number
        nodes = page.locator(".node").evaluate_all("list => list.map(n => n.classList[1])")
        assert nodes == fates
        assert page.locator(".edge").count() == len(fates) - 1
        expect(page.locator(".why")).to_have_text(why)
        expect(page.locator("[aria-current=step]")).to_have_count(1)
        assert page.locator(".pair").bounding_box() == top, "nothing jumps"
        page.keyboard.press("ArrowRight")
    shot(page, "viewer", whole=True)
    facts = page.locator(".tiles").inner_text()
    assert "11\n5 passes of the target" in facts
    assert page.locator(".positions tbody tr").all_inner_texts()[0].endswith("4 / 4")


def test_alternatives_of_the_token_under_the_pointer(page: Page) -> None:
    side = page.locator(".side")
    expect(side).to_contain_text("Alternatives to “·dog”")
    rows = side.locator("tbody tr").all_inner_texts()
    assert [row.split() for row in rows] == [
        ["·dog", ".600", "1", "0"],
        ["·satdrafted", ".250", "0", "1"],
    ]
    page.get_by_role(
        "treeitem", name=re.compile("·the ?: accepted, found by a model p .500 q 1")
    ).hover()
    expect(side).to_contain_text("Alternatives to “·the”")
    assert [row.split() for row in side.locator("tbody tr").all_inner_texts()] == [
        ["·thedrafted", ".900", "1", "1"]
    ]


def test_keys(page: Page) -> None:
    page.keyboard.press("End")
    assert chosen(page) == 5
    page.keyboard.press("ArrowRight")
    assert chosen(page) == 5
    page.keyboard.press("ArrowLeft")
    assert chosen(page) == 4
    page.locator(".node").first.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".node:focus")).to_have_attribute("aria-level", "2")
    page.keyboard.press("?")
    help_ = page.get_by_role("dialog", name="Keys")
    expect(help_).to_be_visible()
    page.keyboard.press("Home")
    assert chosen(page) == 4, "after a dialog nothing moves"
    page.keyboard.press("Escape")
    expect(help_).to_be_hidden()
    page.locator(".segment").nth(1).click()
    assert chosen(page) == 2
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.keyboard.press("t")
    assert page.evaluate(background) == light
    page.keyboard.press("t")
    assert page.evaluate(background) != light


def test_dark_and_narrow(open_page: Open, tmp_path: Path) -> None:
    address = page_of(Trace(STEPS, PIECES), tmp_path)
    options: dict[str, Any] = {"viewport": {"width": 360, "height": 700}, "color_scheme": "dark"}
    page = open_page(address, **options)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in ground.removeprefix("rgb(")[:-1].split(",")) < 64
    shot(page, "viewer-narrow-dark", whole=True)


def contrast(page: Page, selector: str) -> float:
    """WCAG's contrast of an element's text and its background, both opaque."""
    script = """
    (element) => {
      const linear = (c) => (c / 255 <= 0.03928 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4);
      const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(linear);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      let below = element;
      while (getComputedStyle(below).backgroundColor === "rgba(0, 0, 0, 0)")
        below = below.parentElement;
      const pair = [getComputedStyle(element).color, getComputedStyle(below).backgroundColor];
      const [high, low] = pair.map(light).sort((a, b) => b - a);
      return (high + 0.05) / (low + 0.05);
    }
    """
    return float(page.locator(selector).first.evaluate(script))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(open_page: Open, tmp_path: Path, scheme: str) -> None:
    """All text has the 4.5 of WCAG's level AA."""
    page = open_page(page_of(Trace(STEPS, PIECES), tmp_path), color_scheme=scheme)
    tokens = [".token.draft", ".token.correction", ".token.bonus", ".legend .token.plain"]
    nodes = [".node.accepted .numbers", ".node.rejected .text", ".node.unreached .text"]
    others = [".dim", ".tiles dt", ".why", "thead th", ".badge"]
    for selector in [*tokens, *nodes, ".node.correction .numbers", ".node.rejected .numbers"]:
        assert contrast(page, selector) >= 4.5, selector
    for selector in others:
        assert contrast(page, selector) >= 4.5, selector


ATTACK = "</script><img src=x onerror=\"document.title='owned'\"><b>&lt;"


def test_text_of_a_model_is_never_markup(open_page: Open, tmp_path: Path) -> None:
    pieces = {token: f"{ATTACK}{token}" for token in PIECES}
    trace = Trace([*STEPS, replace(CORRECTED, reason=ATTACK)], pieces)
    page = open_page(page_of(trace, tmp_path, ATTACK))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    page.keyboard.press("End")
    expect(page.locator(".why")).to_contain_text(ATTACK)
    for node in page.locator(".node").all():
        node.hover()
    assert page.locator("h1").inner_text() == ATTACK
    assert page.title() == f"{ATTACK} · trace"
    assert page.locator("img, b:not(.mark)").count() == 0
    assert [url for url in asked if not url.startswith("file:")] == []
    page.evaluate(  # even a script that got in would not run, and nothing can be loaded
        """() => {
          const script = document.createElement("script");
          script.textContent = "document.title = 'owned'";
          document.body.append(script);
        }"""
    )
    assert page.title() != "owned"


def drop(page: Page, name: str, text: str) -> None:
    """Drop a file on the page."""
    page.evaluate(
        """([name, text]) => {
          const data = new DataTransfer();
          data.items.add(new File([text], name));
          for (const type of ["dragover", "drop"])
            document.body.dispatchEvent(
              new DragEvent(type, { dataTransfer: data, bubbles: true, cancelable: true }));
        }""",
        [name, text],
    )


def test_drag_and_drop(page: Page) -> None:
    other = Trace([PLAIN, PLAIN], {7: "B"})
    drop(page, "other.json", json.dumps(other.as_dict()))
    expect(page.locator("h1")).to_have_text("other")
    expect(page.locator(".output")).to_have_text("BB")
    damaged = Trace([CORRECTED], PIECES).as_dict()
    damaged["steps"][0]["parents"] = [-1, 7, 0, 0]
    wordy, unlikely = (Trace([CORRECTED], PIECES).as_dict() for _ in range(2))
    wordy["steps"][0]["p"] = ["0.5"] * 4
    unlikely["steps"][0]["candidates"] = [[[7, 0.5, "a", None]]] * 5
    alert = page.get_by_role("alert")
    for text, told in {
        "{": "x.json: This file is not JSON.",
        "[]": "x.json: This is not a trace. Make one with: tokenleap generate PROMPT --trace FILE",
        json.dumps(damaged): "x.json: This trace is damaged: step 1 has a parent after its child.",
        json.dumps(wordy): "x.json: This trace is damaged: step 1 has probabilities that are no "
        "numbers.",
        json.dumps(unlikely): "x.json: This trace is damaged: step 1 has candidates that are no "
        "numbers.",
    }.items():
        drop(page, "x.json", text)
        expect(alert).to_have_text(told)
        expect(page.locator(".output")).to_have_text("BB")
    drop(page, "empty.json", json.dumps(Trace().as_dict()))
    expect(page.get_by_text("This trace has no steps.")).to_be_visible()
    expect(alert).to_be_hidden()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Open a trace").click()
    content = json.dumps({"text": "BB", "trace": other.as_dict()}).encode()
    chooser.value.set_files(
        {"name": "answer.json", "mimeType": "application/json", "buffer": content}
    )
    expect(page.locator(".output")).to_have_text("BB")


def test_what_if(page: Page) -> None:
    """The estimate is the mean over all ways in which the unknown acceptances could turn out."""
    # A [no draft], the cat dog [rejected], the cat \n [bonus], the dog dog [rejected], the
    outcomes = [None, 1, 1, 0, 1, 1, 7 / 9, 1, 1, 0, 1]

    @cache
    def passes(start: int, gamma: int) -> float:
        if start >= len(outcomes):
            return 0
        return 1 + after(start, 0 if outcomes[start] is None else gamma, gamma)

    def after(at: int, left: int, gamma: int) -> float:
        """Passes after the one that has drafted from `at` on `left` tokens, not yet judged."""
        if left == 0 or at >= len(outcomes):
            return passes(at + 1, gamma)
        chance = outcomes[at] or 0
        rejected = 0 if chance == 1 else (1 - chance) * passes(at + 1, gamma)
        return rejected + (0 if chance == 0 else chance * after(at + 1, left - 1, gamma))

    rows = [row.split("\t") for row in page.locator(".what-if tbody tr").all_inner_texts()]
    assert [row[0] for row in rows] == ["as recorded", "plain", "2", "4", "8"]
    assert float(rows[0][1]) == len(STEPS)
    assert float(rows[1][1]) == len(outcomes)
    for row in rows[2:]:
        assert float(row[1]) == pytest.approx(passes(0, int(row[0])), abs=0.06)
    # A pass over n tokens takes 10 ms and 1 ms a token; so does a drafted level, accepting 1 ms.
    assert rows[1][3].strip() == f"{len(outcomes) * 11:.0f} ms"
    expect(page.locator("section", has_text="What if gamma were")).to_contain_text(
        "1 of 11 tokens came from steps without a draft, which stay so. 1 of 11 tokens were a bonus"
    )


def test_what_if_of_the_recorded_length_is_the_recording(open_page: Open, tmp_path: Path) -> None:
    """The first step is slower, because the drafter reads the prompt in it."""
    slow = replace(BONUS, draft_seconds=0.05)
    rejected = step((1, 2), (0,), rejected=(1,), origin=Origin.CORRECTION, reason="no")
    page = open_page(page_of(Trace([slow, rejected, BONUS, rejected, BONUS], PIECES), tmp_path))
    rows = [row.split("\t")[1:] for row in page.locator(".what-if tbody tr").all_inner_texts()]
    recorded, _, two, *_ = rows
    assert two == recorded
    assert recorded[0] == "5"
    # The engine's measurements say that a plain pass takes half as long as these over 3 tokens.
    same = [replace(one, draft_seconds=0.0, accept_seconds=0.0) for one in (BONUS, BONUS)]
    trace = Trace(same, PIECES, pass_seconds={1: 1.0, 2: 1.5, 4: 2.5, 8: 9.0})
    page.goto(page_of(trace, tmp_path))
    times = [
        row.split("\t")[3].strip() for row in page.locator(".what-if tbody tr").all_inner_texts()
    ]
    assert times == ["24.0 ms", "36.0 ms", "24.0 ms", "49.5 ms", "60.8 ms"]
