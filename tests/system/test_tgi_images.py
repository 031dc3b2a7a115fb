"""Requests of TGI's integration tests for models with images, to miniatures of these models.

Their shapes are those of ``integration-tests/models`` of text-generation-inference; answers are
those of random weights, so they are compared with each other.
"""

from __future__ import annotations

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.parity.families import make_checkpoint
from tests.parity.test_image_prompts import checkpoint
from tests.parity.vision_cases import VISION_CASES
from tests.system.conftest import StartServer
from tests.tools.image_models import write_image_model
from tests.tools.vision_model import make_vision_model

pytestmark = pytest.mark.system

CHICKEN, COW = 1, 2
"""Seeds, in place of TGI's two pictures."""

ALL_PARAMETERS: dict[str, Any] = {
    "max_new_tokens": 10,
    "repetition_penalty": 1.2,
    "return_full_text": True,
    "stop": ["test"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 10,
    "truncate": 5,
    "typical_p": 0.9,
    "watermark": True,
    "decoder_input_details": True,
    "details": True,
    "seed": 0,
}


GREEDY: dict[str, Any] = {"max_tokens": 12, "seed": 42, "temperature": 0.0}


def data_url(seed: int, size: tuple[int, int] = (90, 60)) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return url_of(Image.fromarray(pixels), "PNG")


def url_of(image: Image.Image, form: str) -> str:
    file = io.BytesIO()
    image.save(file, form)
    data = base64.b64encode(file.getvalue()).decode()
    return f"data:image/{form.lower()};base64,{data}"


def chat(question: str, seed: int | None = None, text_first: bool = False) -> list[Any]:
    return asking(question, None if seed is None else data_url(seed), text_first)


def asking(question: str, url: str | None, text_first: bool = False) -> list[Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": question}]
    if url is not None:
        image = {"type": "image_url", "image_url": {"url": url}}
        parts.insert(len(parts) if text_first else 0, image)
    return [{"role": "user", "content": parts}]


class Served:
    """A server of one miniature."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=120)

    def generate(self, inputs: str, **parameters: Any) -> dict[str, Any]:
        given = {"details": True, **parameters}
        answer = self.client.post("/generate", json={"inputs": inputs, "parameters": given})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def chat(self, messages: list[Any], **more: Any) -> dict[str, Any]:
        body = {"model": "tgi", "messages": messages, **more}
        answer = self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def streamed(self, messages: list[Any]) -> tuple[str, int]:
        """The text of a streamed chat, and the number of its pieces."""
        body = {"model": "tgi", "messages": messages, "stream": True, **GREEDY}
        text, chunks = "", 0
        with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                for choice in json.loads(line[5:])["choices"]:
                    text += choice["delta"].get("content") or ""
                    chunks += 1
        return text, chunks


@pytest.fixture(scope="module")
def idefics(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Served:
    model = make_vision_model(tmp_path_factory.mktemp("idefics"))
    limits = ("--max-total-tokens", "512", "--max-input-tokens", "480")
    server = start_server("--model-id", str(model), *limits)
    server.wait_ready()
    return Served(server.url)


def family(name: str, kind: str, folder: Path, **preprocessor: Any) -> Path:
    """A complete checkpoint of a miniature, with a vocabulary that holds the tokens of images."""
    case = VISION_CASES[name].case
    size = {"vocab_size": 320}
    whole = size if "vocab_size" in case.values else {}
    text = {**case.values["text_config"], **size}
    make_checkpoint(replace(case, values={**case.values, **whole, "text_config": text}), folder)
    config = json.loads((folder / "config.json").read_text())
    return write_image_model(kind, folder, config, **preprocessor)


class TestIdefics:
    """test_idefics2.py, test_idefics3.py, test_smolvlm.py, test_llava_next.py, test_mllama.py."""

    STORY = "Write me a short story<end_of_utterance> \nAssistant:"

    def test_simple(self, idefics: Served) -> None:
        answer = idefics.generate(
            f"User:![]({data_url(CHICKEN)}){self.STORY}", max_new_tokens=10, seed=1337
        )
        assert answer["details"]["generated_tokens"] == 10
        assert answer["details"]["finish_reason"] == "length"
        assert len(answer["details"]["tokens"]) == 10

    def test_two_images(self, idefics: Served) -> None:
        both = f"![]({data_url(CHICKEN)})![]({data_url(COW)})"
        swapped = f"![]({data_url(COW)})![]({data_url(CHICKEN)})"
        question = "Where are the cow and chicken?<end_of_utterance> \nAssistant:"
        answers = [
            idefics.generate(f"User:{images}{question}", max_new_tokens=20, top_n_tokens=1)
            for images in (both, swapped)
        ]
        first, second = (answer["details"]["tokens"][0]["logprob"] for answer in answers)
        assert first != second, "the order of images matters"

    def test_all_parameters(self, idefics: Served) -> None:
        answers = [idefics.generate("Test request", **ALL_PARAMETERS) for _ in range(2)]
        details = answers[0]["details"]
        assert 1 <= details["generated_tokens"] <= 10
        assert details["seed"] == 0
        assert len(details["prefill"]) == 5, "as it is truncated"
        assert answers[0] == answers[1]

    def test_load(self, idefics: Served) -> None:
        inputs = f"User:![]({data_url(CHICKEN)}){self.STORY}"
        with ThreadPoolExecutor(4) as pool:
            answers = list(
                pool.map(lambda _: idefics.generate(inputs, max_new_tokens=10), range(4))
            )
        assert len({answer["generated_text"] for answer in answers}) == 1

    def test_chat_with_the_image_behind_the_text(self, idefics: Served) -> None:
        story = "Can you tell me a funny very short story based on the image?"
        messages = chat(story, CHICKEN, text_first=True)
        answer = idefics.chat(messages, max_tokens=10, temperature=0.0)
        usage = answer["usage"]
        assert usage["completion_tokens"] == 10
        assert usage["total_tokens"] == usage["prompt_tokens"] + 10
        assert (
            usage["prompt_tokens"]
            > idefics.chat(chat(story), max_tokens=1)["usage"]["prompt_tokens"] + 4
        ), "rows of the image count"

    def test_streaming(self, idefics: Served) -> None:
        text, chunks = idefics.streamed(chat("Describe this image.", COW))
        whole = idefics.chat(chat("Describe this image.", COW), **GREEDY)
        assert text == whole["choices"][0]["message"]["content"]
        assert 1 <= chunks <= 14

    def test_base64_of_several_forms(self, idefics: Served) -> None:
        """test_transformers_llama4.py: nothing on a transparent ground is a white picture."""
        size = (100, 100)
        clear, white = Image.new("RGBA", size), Image.new("RGB", size, "white")
        urls = [url_of(clear, "PNG"), url_of(white, "PNG"), url_of(white, "JPEG")]
        answers = [
            idefics.chat(asking("What do you see?", url), logprobs=True, **GREEDY) for url in urls
        ]
        found = [answer["choices"][0]["logprobs"]["content"][0] for answer in answers]
        assert found[0]["logprob"] == found[1]["logprob"] == found[2]["logprob"]
        cow = idefics.chat(chat("What do you see?", COW), logprobs=True, **GREEDY)
        assert cow["choices"][0]["logprobs"]["content"][0]["logprob"] != found[0]["logprob"]


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen2.5-VL", "LLaVA-NeXT"])
def test_chats_of_a_family(start_server: StartServer, tmp_path: Path, name: str) -> None:
    """test_flash_qwen2_vl.py, test_flash_qwen2_5_vl.py, test_chat_llava_next.py; and
    test_flash_qwen2_vl_video.py, which is refused."""
    model = checkpoint(name, tmp_path)
    server = start_server("--model-id", str(model), "--max-total-tokens", "500")
    server.wait_ready()
    served = Served(server.url)
    question = chat("Describe the image", CHICKEN, text_first=name == "LLaVA-NeXT")
    answer = served.chat(question, **GREEDY)
    assert answer["usage"]["completion_tokens"] <= 12
    text, chunks = served.streamed(question)
    assert text == answer["choices"][0]["message"]["content"]
    assert 1 <= chunks <= 14
    other = served.chat(chat("Describe the image", COW), logprobs=True, **GREEDY)
    first = served.chat(chat("Describe the image", CHICKEN), logprobs=True, **GREEDY)
    found = [each["choices"][0]["logprobs"]["content"][0]["logprob"] for each in (other, first)]
    assert found[0] != found[1], "the image matters"
    video = {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}
    body = {"model": "tgi", "messages": [{"role": "user", "content": [video]}], "stream": True}
    refused = served.client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "`video_url` is not supported by this model" in refused.text
    server.kill()


def test_paligemma(start_server: StartServer, tmp_path: Path) -> None:
    """test_flash_pali_gemma.py, test_flash_pali_gemma2.py."""
    size = {"height": 28, "width": 28}
    model = family("PaliGemma", "PaliGemma", tmp_path / "model", size=size, image_seq_length=16)
    server = start_server("--model-id", str(model), "--max-total-tokens", "250")
    server.wait_ready()
    served = Served(server.url)
    question = "Where is the cow standing?\n"
    answers = [
        served.generate(f"![]({data_url(seed)}){question}", max_new_tokens=20, top_n_tokens=1)
        for seed in (COW, CHICKEN, COW)
    ]
    first = [answer["details"]["tokens"][0]["logprob"] for answer in answers]
    assert first[0] == first[2] != first[1], "the image matters"
    assert answers[0]["generated_text"] == answers[2]["generated_text"]
    both = f"![]({data_url(CHICKEN)})![]({data_url(COW)})"
    swapped = f"![]({data_url(COW)})![]({data_url(CHICKEN)})"
    captions = [
        served.generate(f"caption{images}\n", max_new_tokens=20) for images in (both, swapped)
    ]
    first = [answer["details"]["tokens"][0]["logprob"] for answer in captions]
    assert first[0] != first[1], "the order of images matters"
    assert all(answer["details"]["generated_tokens"] <= 20 for answer in captions)
    server.kill()


def test_qwen2_vl_starts_with_limits_of_a_few_tokens(
    start_server: StartServer, tmp_path: Path
) -> None:
    """test_flash_qwen2_vl_warmup.py: warm-up must not need more than the limits allow."""
    size = {"shortest_edge": 256, "longest_edge": 40 * 64}
    model = family("Qwen2-VL", "Qwen2-VL", tmp_path / "model", patch_size=4, size=size)
    server = start_server(
        *("--model-id", str(model), "--max-input-tokens", "40"),
        *("--max-batch-prefill-tokens", "50", "--max-total-tokens", "51"),
    )
    server.wait_ready()
    served = Served(server.url)
    answer = served.chat(chat("What?"), max_tokens=5, seed=42, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 5
    seen = served.chat(chat("A", CHICKEN), max_tokens=3, ignore_eos=True)
    extra = (
        seen["usage"]["prompt_tokens"]
        - served.chat(chat("A"), max_tokens=1)["usage"]["prompt_tokens"]
    )
    assert 4 < extra <= 10 + 2, "an image takes a quarter of the limit at most, and two marks"
    server.kill()


def test_gemma3_on_two_shards(start_server: StartServer, tmp_path: Path) -> None:
    """test_flash_gemma3.py."""
    size = {"height": 28, "width": 28}
    model = family("Gemma 3", "Gemma 3", tmp_path / "model", size=size)
    server = start_server(
        *("--model-id", str(model), "--num-shard", "2", "--max-total-tokens", "250"),
    )
    server.wait_ready()
    served = Served(server.url)
    text = served.generate("Hello I am doing a project", seed=42, max_new_tokens=20)
    assert text["details"]["generated_tokens"] <= 20
    questions = ("What is the breed of the dog?", "What is shown in this image?")
    answers = [served.chat(chat(question, COW), seed=42, max_tokens=20) for question in questions]
    assert all(answer["usage"]["completion_tokens"] <= 20 for answer in answers)
    again = served.chat(chat(questions[0], COW), seed=42, max_tokens=20)
    assert again["choices"][0]["message"] == answers[0]["choices"][0]["message"]
    long = served.generate("This is nice. " * 14 + "Now count: 1", max_new_tokens=20)
    assert long["details"]["generated_tokens"] <= 20
    server.kill()
