"""A real browser: Debian's Chromium, driven by Playwright. Without it, these tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"

PATIENCE = 60_000
"""Milliseconds: far more than anything takes, on a busy machine, too."""
expect.set_options(timeout=PATIENCE)

Open = Callable[..., Page]
"""Opens an address in a page of its own; other arguments are those of `Browser.new_context`."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of a module's tests: while it runs, `asyncio.run` is refused in this thread."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Pages on which every error is a failure, and whose requests are listed in `page.asked`."""
    contexts = []
    problems: list[str] = []

    def opened(address: str, **options: object) -> Page:
        context = browser.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"a dialog: {dialog.message}"))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


def shot(page: Page, name: str, *, whole: bool = False) -> None:
    """Keep a picture under build/screenshots: of the whole page, or of what can be seen of it."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=whole)
