"""Chat templates of checkpoints that exceed their limits do not affect other requests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from tests.router.fakes import FakeEngine
from tests.unit.text.miniature_templates import TEMPLATES
from tgi_cli.process.worker_pool import Limits
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.state import RouterState
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.chat_template import ChatTemplate

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SOURCE = (
    "{% if messages[0].content == 'slow' %}" + LOOP + "{% endif %}"
    "{% if messages[0].content == 'large' %}{{ 'a' * 10**9 }}{% endif %}"
    "{{ messages[0].content }}"
)
LIMITS = Limits(processes=2, seconds=2.0, megabytes=128, wait_seconds=0.5)
GENEROUS = replace(LIMITS, seconds=60.0, wait_seconds=60.0)
ROUTE = "/v1/chat/completions"


@pytest.fixture
def limits() -> Limits:
    return LIMITS


@pytest.fixture
def app(
    engine: FakeEngine, text: TextBundle, config: RouterConfig, limits: Limits
) -> Iterator[Starlette]:
    template = ChatTemplate({"default": SOURCE}, {}, limits)
    yield create_app(engine, replace(text, chat_template=template), config)
    template.pool.close()


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("content", "cause"),
    [("slow", "more than 2 s to render"), ("large", "more than 128 MB of memory to render")],
)
async def test_failing_template_is_a_template_error(
    client: httpx.AsyncClient, engine: FakeEngine, content: str, cause: str
) -> None:
    for route in (ROUTE, "/chat_tokenize"):
        answer = await client.post(route, json=chat(content))
        assert answer.status_code // 100 == 4
        assert answer.json()["error_type"] == "template_error"
        assert cause in answer.text
    assert engine.requests == []
    assert (await client.post(ROUTE, json=chat("hi"))).status_code == 200


@pytest.mark.parametrize("limits", [GENEROUS])
async def test_slow_template_does_not_delay_others(url: str, state: RouterState) -> None:
    template = state.text.chat_template
    assert template is not None
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        assert (await client.post(ROUTE, json=chat("hi"))).status_code == 200
        slow = asyncio.ensure_future(client.post(ROUTE, json=chat("slow")))
        while template.pool.num_idle:  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0.01)
        for _ in range(3):
            assert (await client.get("/health")).status_code == 200
            assert (await client.post(ROUTE, json=chat("hi"))).status_code == 200
        assert not slow.done()
        template.pool.close()
        assert (await slow).status_code == 503


async def test_number_of_template_processes_is_limited(
    client: httpx.AsyncClient, state: RouterState
) -> None:
    """Of many at once, two take their time; the others get Retry-After."""
    template = state.text.chat_template
    assert template is not None
    answers = await asyncio.gather(*(client.post(ROUTE, json=chat("slow")) for _ in range(12)))
    assert {answer.status_code for answer in answers} <= {400, 422, 429}
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) >= 6
    assert int(refused[0].headers["retry-after"]) >= 1
    assert len(template.pool.process_ids) <= LIMITS.processes
    assert state.admission.in_flight == 0


@pytest.mark.parametrize("limits", [GENEROUS])
async def test_killed_process_is_not_a_template_error(
    client: httpx.AsyncClient, state: RouterState
) -> None:
    template = state.text.chat_template
    assert template is not None
    assert (await client.post(ROUTE, json=chat("hi"))).status_code == 200
    (pid,) = template.pool.process_ids
    os.kill(pid, signal.SIGSTOP)
    asked = asyncio.ensure_future(client.post(ROUTE, json=chat("hi")))
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    assert (await asked).status_code == 200


async def test_failure_to_start_a_process_is_503(
    client: httpx.AsyncClient, state: RouterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = state.text.chat_template
    assert template is not None
    (pid,) = template.pool.process_ids
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    answer = await client.post(ROUTE, json=chat("hi"))
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"


async def test_conversations_are_adapted_to_the_template(
    engine: FakeEngine, text: TextBundle, config: RouterConfig
) -> None:
    """In a template that would raise: roles alternate, and there is no system role."""
    template = ChatTemplate({"default": TEMPLATES["no_system"][0]}, {})
    engine.info = replace(engine.info, max_input_tokens=255, max_total_tokens=256)
    app = create_app(engine, replace(text, chat_template=template), config)
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [
        {"role": "developer", "content": "A"},
        {"role": "system", "content": "B"},
        {"role": "user", "content": parts},
        {"role": "system", "content": "C"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "y"},
    ]
    prompts = []
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        for end in (4, 6):
            answer = await client.post(ROUTE, json={"messages": messages[:end]})
            assert answer.status_code == 200, answer.text
            ids = engine.requests[-1].prompt_ids
            prompts.append(engine.tokenizer.decode(ids, skip_special_tokens=False))
    assert prompts[0] == "<user>A\n\nB\n\nhi\n\n<system-reminder>\nC\n</system-reminder></>"
    assert prompts[1] == prompts[0] + "<assistant>x</><user>y</>"
