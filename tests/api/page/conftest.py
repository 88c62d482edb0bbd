"""A real browser for the tests of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.processes import PATIENCE_S

CHROMIUM = os.environ.get("TAP_CHROMIUM") or next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
NO_CHROMIUM = "the page was NOT tested: no Chromium on the PATH; apt-get install chromium, or set TAP_CHROMIUM"
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync"]



@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fresh tab; whatever it complained of, or asked of others, fails the test."""
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.set_default_timeout(1000 * PATIENCE_S)
    wrong: list[str] = []
    # The page shows the reason of a refusal itself; the pixels are read back by these tests alone.
    expected = ("the server responded with a status of 4", "willReadFrequently",
                *getattr(request.module, "EXPECTED", ()))
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning")
            and not any(text in message.text for text in expected) else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url)
            if not request.url.startswith("http://127.0.0.1:") else None)
    yield page
    page.close()
    assert wrong == []
