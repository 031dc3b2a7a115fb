"""A server that fetches images from one site, and from nowhere else."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.system.conftest import StartServer
from tests.tools.vision_model import make_vision_model
from tests.tools.web_site import answer, redirect, web_site

pytestmark = pytest.mark.system

LIMITS = ("--max-total-tokens", "512", "--max-input-tokens", "480", "--dtype", "float32")


def png(side: int = 56, noise: bool = False) -> bytes:
    pixels = os.urandom(side * side * 3) if noise else bytes(range(256)) * (side * side * 3 // 256)
    file = io.BytesIO()
    Image.frombytes("RGB", (side, side), pixels.ljust(side * side * 3)).save(file, "PNG")
    return file.getvalue()


def chat(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4, "temperature": 0}


async def test_images_are_fetched_from_the_allowed_site_alone(
    start_server: StartServer, tmp_path: Path
) -> None:
    model = make_vision_model(tmp_path / "model")
    photo = png()
    async with web_site(answer(b"secret")) as other:
        elsewhere = redirect(f"http://127.0.0.1:{other.port}/")
        async with web_site(answer(photo), elsewhere, answer(b"<html>")) as site:
            server = start_server(
                *("--model-id", str(model), *LIMITS, "--allow-private-media"),
                *("--allowed-media-domains", f"127.0.0.1:{site.port}", "--max-images", "1"),
            )
            server.wait_ready()
            own = f"http://127.0.0.1:{site.port}/photo.png"
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

                async def ask(url: str) -> httpx.Response:
                    return await client.post("/v1/chat/completions", json=chat(url))

                fetched = await ask(own)
                assert fetched.status_code == 200, fetched.text
                redirected, page = await ask(own), await ask(own)
                refused = [
                    await ask(url)
                    for url in (
                        f"http://127.0.0.1:{other.port}/",
                        f"http://localhost:{site.port}/",
                        "http://169.254.169.254/latest/meta-data/",
                        "file:///etc/passwd",
                    )
                ]
                sent = f"data:image/png;base64,{base64.b64encode(photo).decode()}"
                given = await ask(sent)
                large = png(1100, noise=True)
                assert len(large) > 3_000_000
                body = await ask(f"data:image/png;base64,{base64.b64encode(large).decode()}")
            assert (site.connections, other.connections) == (3, 0)
    usage = given.json()["usage"]
    assert usage["prompt_tokens"] == fetched.json()["usage"]["prompt_tokens"] > 10
    assert usage["prompt_tokens_details"]["cached_tokens"] > 10, "the same image, cached"
    assert given.json()["choices"][0]["message"] == fetched.json()["choices"][0]["message"]
    assert body.status_code == 200, "a body of more than TGI's 2 MB"
    assert "not among the allowed ones" in refused[0].text or "port" in refused[0].text
    assert {each.status_code for each in (redirected, page, *refused)} == {400}
    assert "it is not a PNG, JPEG, WebP, GIF or TIFF file" in page.text
    assert "secret" not in redirected.text
