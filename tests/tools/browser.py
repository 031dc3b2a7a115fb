"""Chromium without a window, which keeps a record of what a page must not do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

TIMEOUT_MS = 240_000.0
"""For any condition that is waited for: the machine may be busy."""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FAILED = "Failed to load resource"
"""How the console reports statuses of errors, which tests provoke."""


def find_browser() -> str | None:
    """The program of ``TGI_TEST_BROWSER``, or Chromium or Chrome of the system, or None."""
    names = [os.environ.get("TGI_TEST_BROWSER", ""), *_NAMES]
    return next((path for name in names if name and (path := shutil.which(name))), None)


@contextmanager
def launched(program: str) -> Iterator[Browser]:
    """The browser. No event loop may run meanwhile in this thread."""
    # Its sandbox refuses to run as root, as in most containers.
    sandbox = [] if os.geteuid() else ["--no-sandbox"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=[*sandbox, "--disable-dev-shm-usage"],
            timeout=TIMEOUT_MS,
        )
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page and what has happened on it.

    Attributes:
        requests: all URLs that were asked for.
        complaints: exceptions, and errors in the console: violated policies among them.
    """

    page: Page
    url: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, context: BrowserContext, url: str) -> Visit:
        """Open the URL in a new page."""
        visit = cls(context.new_page(), url)
        page = visit.page
        page.set_default_timeout(TIMEOUT_MS)
        page.on("request", lambda request: visit.requests.append(request.url))
        page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        page.on("console", visit._on_console)
        page.goto(url)
        return visit

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(_FAILED):
            self.complaints.append(message.text)

    @property
    def left(self) -> list[str]:
        """Requests that have left the origin of the page."""
        own = (self.url, "data:", f"blob:{self.url}")
        return [url for url in self.requests if not url.startswith(own)]


def chunk(**delta: Any) -> dict[str, Any]:
    """A chunk of a chat completion."""
    return {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
