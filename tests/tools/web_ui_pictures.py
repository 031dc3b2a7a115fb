"""Pictures of the web UI, for the documentation and to be looked at.

python -m tests.tools.web_ui_pictures FOLDER  # of the bundled model, which it serves meanwhile
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, expect

from tests.tools.browser import Visit, find_browser, launched
from tests.tools.server_process import ServerProcess

QUESTIONS = ("How do I read a JSON file?", "What is itertools.chain?")
OTHERS = ("def parse(text):", "import os\n", "class Reader:\n", "The module provides")
"""Prompts of other clients, so that there is something to see in the server's tab."""
TOKEN = " returns"
"""A token of the last answer, for which the model had alternatives."""
WIDE = {"width": 1400, "height": 900}
PHONE = {"width": 390, "height": 844}


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Requests of other clients, until the block ends."""
    ended = threading.Event()

    def ask(number: int) -> None:
        while not ended.is_set():
            prompt = OTHERS[number % len(OTHERS)]
            parameters = {"max_new_tokens": 60 + 40 * number, "do_sample": True}
            httpx.post(
                f"{url}/generate", json={"inputs": prompt, "parameters": parameters}, timeout=60
            )
            ended.wait(0.4 * number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def chat(page: Page) -> None:
    """Ask the questions, greedily."""
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Maximum tokens").fill("200")
    page.get_by_role("tab", name="Server").click()
    close = page.get_by_role("button", name="Close panel")
    if page.viewport_size == PHONE:
        close.click()
    for question in QUESTIONS:
        page.get_by_label("Message", exact=True).fill(question)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".answer").last).to_have_attribute("aria-busy", "false")


def take(browser: Browser, url: str, folder: Path, seconds: int) -> None:
    """Pictures in light and dark, and of a phone."""
    for theme in ("light", "dark"):
        for name, size in (("", WIDE), ("-phone", PHONE)):
            context = browser.new_context(
                viewport=size,  # type: ignore[arg-type]
                color_scheme=theme,  # type: ignore[arg-type]
                has_touch=size is PHONE,
                is_mobile=size is PHONE,
                device_scale_factor=1 if size is WIDE else 2,
            )
            page = Visit.open(context, f"{url}/").page
            expect(page.locator("#model-facts")).to_contain_text("reads text")
            page.screenshot(path=folder / f"{theme}{name}-welcome.png")
            chat(page)
            if size is WIDE:
                page.wait_for_timeout(seconds * 1000)
            page.screenshot(path=folder / f"{theme}{name}-chat.png")
            page.get_by_role("button", name="Tokens").last.click()
            token = page.locator(".token", has_text=TOKEN).last
            token.scroll_into_view_if_needed()
            token.hover()
            page.screenshot(path=folder / f"{theme}{name}-tokens.png")
            page.get_by_role("button", name="Settings", exact=True).click()
            page.get_by_role("button", name="Example").click()
            page.wait_for_timeout(300)  # until the drawer is there
            page.screenshot(path=folder / f"{theme}{name}-settings.png")
            page.get_by_role("tab", name="Server").click()
            page.wait_for_timeout(1500)
            page.screenshot(path=folder / f"{theme}{name}-server.png")
            context.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=int, default=20, help="of traffic before a picture")
    arguments = parser.parse_args()
    program = find_browser()
    if program is None:
        raise SystemExit("no Chromium: install it, or set TGI_TEST_BROWSER")
    arguments.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tgi-web-ui-") as folder:
        options = ["serve", "--hostname", "127.0.0.1", "--port", "0"]
        server = ServerProcess(Path(folder) / "0", options)
        try:
            server.wait_ready()
            with launched(program) as browser, traffic(server.url):
                take(browser, server.url, arguments.folder, arguments.seconds)
        finally:
            server.kill()


if __name__ == "__main__":
    main()
