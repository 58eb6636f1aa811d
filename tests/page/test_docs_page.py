"""Swagger UI at `/docs` in a browser: it asks this server only, and its examples can be sent."""

from __future__ import annotations

from urllib.parse import urlsplit

from playwright.sync_api import expect

from tests.page.conftest import Open, shot
from tests.serve.support import served


def test_a_request_from_the_description(open_page: Open) -> None:
    with served(api_keys=("secret",)) as running:
        page = open_page("about:blank")
        asked, refused = list[str](), list[str]()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda line: refused.append(line.text) if line.type == "error" else None)
        page.goto(f"{running.url}/docs")
        page.get_by_role("button", name="Authorize").click()
        page.locator(".auth-container input").fill("secret")
        page.locator(".auth-btn-wrapper .authorize").click()
        page.locator(".auth-btn-wrapper .btn-done").click()
        endpoint = page.locator(".opblock", has_text="/v1/completions").first
        endpoint.locator(".opblock-summary-control").click()
        endpoint.get_by_role("button", name="Execute").click()
        answer = endpoint.locator(".live-responses-table")
        expect(answer).to_contain_text("text_completion")
        shot(page, "docs")
        assert {urlsplit(url).netloc for url in asked if url[:5] != "data:"} == {
            urlsplit(running.url).netloc
        }
        assert refused == []  # by the page's policy
        page.close()
