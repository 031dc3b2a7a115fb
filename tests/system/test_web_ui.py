"""The web UI in a browser, with a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.tools.browser import TIMEOUT_MS, Visit, chunk, find_browser, launched
from tests.tools.server_process import ServerProcess, poll

BROWSER = find_browser()
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        BROWSER is None, reason="no Chromium: install it (Debian: chromium) or set TGI_TEST_BROWSER"
    ),
]
SECONDS = TIMEOUT_MS / 1000
CHAT = "**/v1/chat/completions"
STOP_AFTER_200_CHARACTERS = """stop => {
  const watch = new MutationObserver(() => {
    const text = [...document.querySelectorAll(".answer .markdown")].at(-1)?.textContent ?? "";
    if (stop.hidden || text.length < 200) return;
    watch.disconnect();
    stop.click();
  });
  watch.observe(document.body, { childList: true, characterData: true, subtree: true });
}"""
STORED_CONVERSATIONS = """() => new Promise((resolve, reject) => {
  const opening = indexedDB.open("tgi");
  opening.onerror = () => reject(opening.error);
  opening.onsuccess = () => {
    const database = opening.result;
    const reading = database.transaction("conversations").objectStore("conversations").getAll();
    reading.onerror = () => reject(reading.error);
    reading.onsuccess = () => {
      database.close();
      resolve(reading.result);
    };
  };
})"""
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154"
    "789c63f8cfc000000301010018dd8db00000000049454e44ae426082"
)
HOSTILE = """Hello <script>window.pwned = 1</script>

<img src="x" onerror="window.pwned = 2"> ![picture](https://evil.example/track.png)
![inside](data:image/svg+xml;base64,AAAA)

[run](javascript:window.pwned=3) [data](data:text/html,<script>window.pwned=4</script>)
[evil](https://evil.example/page "title") <https://evil.example/auto> [near](/metrics)
[![both](https://evil.example/both.png)](JaVaScRiPt:window.pwned=5)

<iframe src="https://evil.example/frame"></iframe>
<svg onload="window.pwned = 6"><style>@import "https://evil.example/a.css";</style></svg>
<a href="https://evil.example" id="send" class="send" style="position:fixed">x</a>
<form action="https://evil.example"><input name="key"></form><meta http-equiv="refresh" content="0">

```html" onmouseover="window.pwned=7
<b onclick="window.pwned = 8">code</b>
```

| a | b |
|---|---|
| <object data="https://evil.example/o"> | `<embed src=x>` |
"""

_ROW = " | ".join(["measurement"] * 9)
WIDE = f"| {_ROW} |\n|{'---|' * 9}\n| {_ROW} |\n\n```python\nprint({'x' * 90!r})\n```\n"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert BROWSER is not None
    with launched(BROWSER) as browser:
        expect.set_options(timeout=TIMEOUT_MS)
        yield browser


@pytest.fixture
def options() -> dict[str, Any]:
    """Override in a class: options of the browser's context, such as its size."""
    return {"viewport": {"width": 1400, "height": 900}}


@pytest.fixture
def visit(browser: Browser, server: ServerProcess, options: dict[str, Any]) -> Iterator[Visit]:
    """The page with an empty storage; it must not complain, nor ask other hosts."""
    context = browser.new_context(**options)
    visit = Visit.open(context, f"{server.url}/")
    expect(visit.page.locator("#model-facts")).to_contain_text("reads text")
    yield visit
    context.close()
    assert visit.complaints == []
    assert visit.left == []


@pytest.fixture
def page(visit: Visit) -> Page:
    return visit.page


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def complete(page: Page) -> str:
    """The text of the last answer, once it is complete."""
    answer = page.locator(".answer").last
    expect(answer).to_have_attribute("aria-busy", "false")
    return answer.locator(".markdown").last.inner_text()


def set_limit(page: Page, tokens: int) -> None:
    page.get_by_role("tab", name="Settings").click()
    page.get_by_label("Maximum tokens").fill(str(tokens))


def scripted(*chunks: dict[str, Any], status: int = 200, **body: Any) -> Callable[[Route], None]:
    """Answers with a stream of chunks, or with a status and a body."""
    lines = [f"data: {json.dumps(each)}\n\n" for each in chunks]

    def answer(route: Route) -> None:
        if status == 200:
            stream = "".join([*lines, "data: [DONE]\n\n"])
            route.fulfill(body=stream, content_type="text/event-stream")
        else:
            route.fulfill(status=status, json=body, headers={"retry-after": "7"})

    return answer


def test_answers_stream_stop_and_are_regenerated(page: Page, server: ServerProcess) -> None:
    def prolong(route: Route) -> None:
        # Hot, so that no text is repeated, which drafts would end within a moment.
        long = {"min_tokens": 1900, "max_tokens": 1900, "temperature": 1.5}
        body = json.loads(route.request.post_data or "") | long
        route.continue_(post_data=json.dumps(body))

    def metric(name: str) -> float:
        text = httpx.get(f"{server.url}/metrics", timeout=SECONDS).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    dropped = 'tgi_request_failure{err="dropped"}'
    before = metric(dropped)
    page.route(CHAT, prolong)
    # Within the page: a click from here may come when the answer is complete.
    stop = page.get_by_role("button", name="Stop", exact=True, include_hidden=True)
    stop.evaluate(STOP_AFTER_200_CHARACTERS)
    send(page, "Tell me a very long story.")
    stopped = complete(page)
    expect(page.locator(".answer .stats")).to_contain_text("stopped")
    poll(lambda: metric("tgi_batch_current_size") == 0, SECONDS, "the request ends")
    assert metric(dropped) > before, "it has run to its end"
    page.unroute(CHAT)
    set_limit(page, 8)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".versions")).to_have_text("2 / 2")
    assert complete(page) != stopped
    expect(page.locator(".answer .stats")).to_contain_text("tokens")
    page.get_by_role("button", name="Previous answer").click()
    assert complete(page) == stopped
    expect(page.locator(".message")).to_have_count(2)


def test_suggestions_are_some_that_the_model_can_answer(page: Page) -> None:
    page.get_by_role("button", name="How do I open a file?").click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("How do I open a file?")
    page.get_by_role("button", name="Send").click()
    assert "with open(path" in complete(page)
    expect(page.locator(".answer .code")).to_have_count(1)


def test_edited_message_replaces_what_followed(page: Page) -> None:
    set_limit(page, 6)
    for text in ("First", "Second"):
        send(page, text)
        complete(page)
    page.locator(".user").first.hover()
    page.get_by_role("button", name="Edit").first.click()
    with page.expect_request(CHAT) as request:
        page.get_by_label("Edit the message").fill("Other")
        page.keyboard.press("Enter")
    assert [each["content"] for each in request.value.post_data_json["messages"]] == ["Other"]
    complete(page)
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator(".bubble")).to_have_text("Other")


def test_tokens_show_alternatives_on_hover_and_by_keys(page: Page) -> None:
    set_limit(page, 10)
    send(page, "Hello!")
    text = complete(page)
    page.get_by_role("button", name="Tokens").click()
    tokens = page.locator(".token")
    expect(tokens.first).to_be_visible()
    assert "".join(tokens.all_inner_texts()).strip()
    card = page.get_by_role("tooltip")
    tokens.nth(1).hover()
    expect(card).to_be_visible()
    expect(card.locator(".token-head")).to_contain_text("%")
    assert card.locator(".alternatives li").count() >= 5
    expect(card.locator(".chosen")).to_have_count(1)
    page.mouse.move(0, 0)
    expect(card).to_be_hidden()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(card).to_be_visible()
    page.get_by_role("button", name="Tokens").click()
    assert complete(page) == text


def test_answers_follow_a_loaded_schema(page: Page, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    page.get_by_role("tab", name="Settings").click()
    page.locator("#set-schema-file").set_input_files(file)
    expect(page.locator("#set-schema-state")).to_have_text("Valid JSON")
    expect(page.get_by_role("switch", name="Answers follow this schema")).to_be_checked()
    expect(page.get_by_role("button", name="JSON schema")).to_be_visible()
    send(page, "When?")
    assert isinstance(json.loads(complete(page))["year"], int)
    page.get_by_label("JSON schema", exact=True).fill("{")
    expect(page.locator("#set-schema-state")).to_have_class("fine bad")
    send(page, "When?")
    expect(page.locator(".error")).to_contain_text("not valid JSON")


def test_settings_reach_the_request(page: Page) -> None:
    page.get_by_role("tab", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.35")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Stop strings, one per line").fill("END\n###")
    page.get_by_label("Reasoning effort").select_option("low")
    page.get_by_label("Alternatives of each token").fill("2")
    page.route(CHAT, scripted(chunk(content="Fine.")))
    with page.expect_request(CHAT) as request:
        send(page, "Hello")
    assert request.value.post_data_json == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        "temperature": 0.35,
        "seed": 7,
        "stop": ["END", "###"],
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def finished(page: Page) -> bool:
    """Whether the first conversation is stored with a complete answer."""
    conversations = page.evaluate(STORED_CONVERSATIONS)
    return bool(conversations and conversations[0]["messages"][-1]["versions"][-1]["finish"])


def test_conversations_and_theme_survive_a_reload(page: Page, tmp_path: Path) -> None:
    set_limit(page, 6)
    send(page, "Remember me")
    text = complete(page)
    poll(lambda: finished(page), SECONDS, "the answer is stored")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    for _ in range(2):  # system, light, dark
        page.get_by_role("button", name="Theme").click()
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    assert page.evaluate(background) == dark
    expect(page.locator(".bubble")).to_have_text("Remember me")
    assert complete(page) == text
    with page.expect_download() as download:
        page.get_by_role("button", name="Export conversations").click()
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete all conversations").click()
    expect(page.locator(".entry")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    page.locator("#import-file").set_input_files(file)
    page.locator(".entry").get_by_text("Remember me").click()
    assert complete(page) == text


def test_text_of_the_model_never_becomes_active(page: Page, visit: Visit) -> None:
    page.route(CHAT, scripted(chunk(reasoning_content=HOSTILE), chunk(content=HOSTILE)))
    send(page, HOSTILE)
    complete(page)
    page.locator(".thinking summary").click()
    page.locator(".answer .code").last.hover()
    for link in page.locator(".answer a[href]").all():
        assert str(link.get_attribute("href")).startswith("https://evil.example")
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        assert link.get_attribute("target") == "_blank"
    assert page.locator(".answer a[href]").count() > 4
    active = "script, img, iframe, object, embed, form, input, meta, style, link, [style], [id]"
    assert page.locator(f".answer .markdown :is({active})").count() == 0
    attributes = page.locator(".answer .markdown").evaluate_all(
        "views => views.flatMap(v => [...v.querySelectorAll('*')]).flatMap(e =>"
        " [...e.attributes].map(a => a.name)).filter(name => name.startsWith('on'))"
    )
    assert attributes == []
    assert page.evaluate("window.pwned") is None
    expect(page.locator(".bubble")).to_contain_text("<script>")


ERRORS: list[tuple[int, dict[str, Any], str]] = [
    (401, {"error": {"message": "no", "code": "invalid_api_key"}}, "needs an API key"),
    (429, {"error": {"message": "full", "code": "rate_limit_exceeded"}}, "asks to wait 7 s"),
    (503, {"error": {"message": "loading", "code": "service_unavailable"}}, "isn't ready"),
    (
        400,
        {"error": {"message": "5000 tokens", "code": "context_length_exceeded"}},
        "no longer fits the model's context",
    ),
    (0, {}, "can't be reached"),
]


@pytest.mark.parametrize(("status", "body", "words"), ERRORS, ids=[str(e[0]) for e in ERRORS])
def test_errors_are_told_beside_the_message_with_a_retry(
    page: Page, status: int, body: dict[str, Any], words: str
) -> None:
    set_limit(page, 5)
    page.route(CHAT, scripted(status=status, **body) if status else lambda route: route.abort())
    send(page, "Hello")
    box = page.locator(".answer .error")
    expect(box).to_contain_text(words)
    page.unroute(CHAT)
    box.get_by_role("button", name="Retry").click()
    expect(box).to_have_count(0)
    assert complete(page)
    expect(page.locator(".versions")).to_have_count(0)


def test_stream_that_breaks_keeps_what_has_come(page: Page) -> None:
    failure = {"error": {"message": "the model server is gone", "type": "server_error"}}
    page.route(CHAT, scripted(chunk(content="The beginning"), failure))
    send(page, "Hello")
    expect(page.locator(".answer .error")).to_contain_text("the model server is gone")
    assert complete(page) == "The beginning"


def test_thinking_is_folded(page: Page) -> None:
    page.route(CHAT, scripted(chunk(reasoning_content="Let me see."), chunk(content="Four.")))
    send(page, "2 + 2?")
    assert complete(page) == "Four."
    thought = page.get_by_text("Let me see.")
    expect(thought).to_be_hidden()
    page.get_by_text("Thought for").click()
    expect(thought).to_be_visible()


def test_key_is_asked_for_kept_and_sent(page: Page) -> None:
    seen = []

    def guard(route: Route) -> None:
        seen.append(route.request.headers.get("authorization"))
        if seen[-1] == "Bearer s3cret":
            route.fallback()
        else:
            route.fulfill(status=401, json={"error": {"message": "no key"}})

    for path in ("**/v1/**", "**/metrics"):
        page.route(path, guard)
    page.reload()
    page.get_by_role("button", name="Enter a key").click()
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type("s3cret")
    page.keyboard.press("Enter")
    expect(page.locator("#banner")).to_be_hidden()
    set_limit(page, 5)
    send(page, "Hello")
    assert complete(page)
    page.get_by_role("tab", name="Server").click()
    expect(page.locator(".server-state")).to_contain_text("Running")
    page.reload()
    expect(page.locator("#model-facts")).to_contain_text("reads text")
    assert seen[-1] == "Bearer s3cret"


def test_images_are_sent_to_models_that_see(page: Page) -> None:
    expect(page.get_by_role("button", name="Add images")).to_be_hidden()
    page.route(CHAT, scripted(chunk(content="A dot.")))

    def add_images(route: Route) -> None:
        models = route.fetch().json()
        models["data"][0]["architecture"]["input_modalities"].append("image")
        route.fulfill(json=models)

    page.route("**/v1/models", add_images)
    page.reload()
    expect(page.get_by_role("button", name="Add images")).to_be_visible()
    picture = {"name": "dot.png", "mimeType": "image/png", "buffer": PNG}
    page.locator("#image-file").set_input_files([picture, picture])  # type: ignore[list-item]
    page.evaluate(
        """async bytes => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], "p.png", { type: "image/png" }));
          const area = document.getElementById("prompt");
          area.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
          area.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
        }""",
        list(PNG),
    )
    expect(page.locator(".thumbnail")).to_have_count(4)
    page.get_by_role("button", name="Remove image 1").click()
    with page.expect_request(CHAT) as request:
        send(page, "What is it?")
    (message,) = request.value.post_data_json["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url"] * 3 + ["text"]
    assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    complete(page)
    expect(page.locator(".user img")).to_have_count(3)


def test_server_tab_follows_the_metrics_while_it_is_visible(page: Page, visit: Visit) -> None:
    set_limit(page, 40)
    page.get_by_role("tab", name="Server").click()
    send(page, "Hello")
    complete(page)
    tile = page.get_by_role("region", name="Time to first token")
    expect(tile.locator("strong")).to_contain_text("s")
    expect(page.get_by_role("region", name="KV cache")).to_contain_text("tokens")
    assert [url for url in visit.requests if url.endswith("/metrics")]
    page.get_by_role("button", name="Close panel").click()
    expect(page.get_by_role("region", name="KV cache")).to_be_hidden()
    polls = [url for url in visit.requests if url.endswith("/metrics")]
    page.wait_for_timeout(2500)
    late = [url for url in visit.requests if url.endswith("/metrics")]
    assert len(late) <= len(polls) + 1, "one may have been on its way"


def test_page_works_below_a_prefix(browser: Browser, server: ServerProcess) -> None:
    """As behind a proxy that removes it."""
    context = browser.new_context()
    outside = []

    def forward(route: Route) -> None:
        url = route.request.url
        if "/llm/" not in url:
            outside.append(url)
        route.fulfill(response=route.fetch(url=url.replace("/llm/", "/")))

    context.route("**/*", forward)
    visit = Visit.open(context, f"{server.url}/llm/")
    expect(visit.page.locator("#model-facts")).to_contain_text("reads text")
    send(visit.page, "Hello")
    assert complete(visit.page)
    context.unroute_all(behavior="ignoreErrors")
    context.close()
    assert outside == []


class TestPhone:
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}

    def test_both_sides_are_drawers(self, page: Page) -> None:
        page.get_by_label("Message", exact=True).fill("A long word: " + "w" * 200)
        page.get_by_role("button", name="Send").tap()
        complete(page)
        assert page.evaluate("document.scrollingElement.scrollWidth") == 390
        for name, close in (("Conversations", "Close conversations"), ("Settings", "Close panel")):
            opener = page.get_by_role("button", name=name, exact=True)
            opener.tap()
            expect(page.get_by_role("button", name=close)).to_be_focused()
            page.keyboard.press("Escape")
            expect(page.get_by_role("button", name=close)).to_be_hidden()
            expect(opener).to_be_focused()

    def test_wide_content_scrolls_within_the_answer(self, page: Page) -> None:
        page.route(CHAT, scripted(chunk(content=WIDE)))
        page.get_by_label("Message", exact=True).fill("Hello")
        page.get_by_role("button", name="Send").tap()
        complete(page)
        assert page.evaluate("document.scrollingElement.scrollWidth") == 390
        for part in (".table", ".code pre"):
            box = page.locator(f".answer {part}")
            assert box.evaluate("box => box.scrollWidth > box.clientWidth"), part
        heading = page.locator(".answer th").first
        assert heading.evaluate("cell => cell.clientHeight") < 50, "a word is one line"
        for button in page.locator(".answer button:visible, .topbar button:visible").all():
            size = button.bounding_box()
            assert size is not None
            assert min(size["width"], size["height"]) >= 36, button.get_attribute("aria-label")


def test_every_control_has_a_name(page: Page) -> None:
    set_limit(page, 5)
    send(page, "Hello")
    complete(page)
    snapshot = page.locator("body").aria_snapshot()
    unnamed = [
        line for line in snapshot.splitlines() if line.strip(" :") in ("- button", "- textbox")
    ]
    assert unnamed == []
