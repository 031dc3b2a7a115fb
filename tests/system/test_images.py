"""Images through whole servers: every way in, with the clients that people use."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from huggingface_hub import InferenceClient
from PIL import Image

from tests.system.conftest import StartServer
from tests.tools.grpc_reflection import ReflectionClient
from tests.tools.server_process import ServerProcess
from tests.tools.vision_model import IMAGE_TOKEN, make_vision_model
from tests.unit.tgi_grpc.fakes import V2, V3, Heard
from tgi_cli import LLM
from tgi_cli.bench import saved_runs
from tgi_cli.bench.events import BenchRun
from tgi_cli.bench.statistics.metrics import step_metrics
from tgi_cli.text.tokenizer import Tokenizer

pytestmark = pytest.mark.system

QUESTION = "What?"
TOKENS = 12
LIMITS = ("--max-total-tokens", "512", "--max-input-tokens", "480", "--dtype", "float32")


def picture(seed: int) -> Image.Image:
    """A picture of 56 x 56 pixels, which is four tiles and the whole."""
    pixels = [(x * seed % 256, y * 3 % 256, seed * 40 % 256) for y in range(56) for x in range(56)]
    return Image.frombytes("RGB", (56, 56), bytes(value for pixel in pixels for value in pixel))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def chat(*images: Image.Image, question: str = QUESTION) -> list[Any]:
    """A conversation in OpenAI's form."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def shard() -> Iterator[Path]:
    """The prefix of the socket of TGI's services."""
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as folder:
        yield Path(folder) / "shard"


@pytest.fixture(scope="module")
def server(start_server: StartServer, model: Path, shard: Path) -> ServerProcess:
    server = start_server("--model-id", str(model), "--shard-uds-path", str(shard), *LIMITS)
    server.wait_ready()
    return server


@pytest.fixture(scope="module")
def ai(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60)


def test_tgi_chat_sends_files(server: ServerProcess, ai: openai.OpenAI, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    photo.write_bytes(png(picture(3)))
    command = [sys.executable, "-m", "tgi_cli", "chat", server.url, "-i", str(photo)]
    done = subprocess.run(
        [*command, "-p", QUESTION, "-n", str(TOKENS), "-t", "0"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=True,
    )
    answer = ai.chat.completions.create(
        model="tgi", messages=chat(picture(3)), max_tokens=TOKENS, temperature=0
    )
    expected = answer.choices[0].message.content
    assert expected
    assert done.stdout.decode().strip("\n") == expected.strip("\n")


@pytest.fixture(scope="module")
def expected(ai: openai.OpenAI) -> str:
    """The answer of a chat about the first picture."""
    return ask(ai, picture(1)).choices[0].message.content or ""


def ask(ai: openai.OpenAI, *images: Image.Image, **more: Any) -> Any:
    return ai.chat.completions.create(
        model="tgi", messages=chat(*images), max_tokens=TOKENS, temperature=0, **more
    )


class TestEveryWayIn:
    """The same prompt, so the same tokens."""

    def test_responses(self, ai: openai.OpenAI, expected: str) -> None:
        content: Any = [
            {"type": "input_image", "image_url": data_url(picture(1))},
            {"type": "input_text", "text": QUESTION},
        ]
        answer = ai.responses.create(
            model="tgi",
            input=[{"role": "user", "content": content}],
            max_output_tokens=TOKENS,
            temperature=0,
        )
        assert answer.output_text == expected

    def test_messages(self, server: ServerProcess, expected: str) -> None:
        claude = anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0, timeout=60)
        data = base64.b64encode(png(picture(1))).decode()
        source: Any = {"type": "base64", "media_type": "image/png", "data": data}
        message = claude.messages.create(
            model="tgi",
            max_tokens=TOKENS,
            extra_body={"temperature": 0},
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": source},
                        {"type": "text", "text": QUESTION},
                    ],
                }
            ],
        )
        assert message.content[0].type == "text"
        assert message.content[0].text == expected

    def test_markdown(self, server: ServerProcess, model: Path, expected: str) -> None:
        hub = InferenceClient(server.url, timeout=60)
        prompt = f"User:![]({data_url(picture(1))}) {QUESTION}<end_of_utterance>\nAssistant:"
        found = hub.text_generation(
            f"<|im_start|>{prompt}", max_new_tokens=TOKENS, return_full_text=False
        )
        assert found == expected

    @pytest.mark.parametrize("service", [V2, V3])
    def test_tgis_services(
        self, server: ServerProcess, shard: Path, model: Path, expected: str, service: str
    ) -> None:
        before, behind = "<|im_start|>User:", f" {QUESTION}<end_of_utterance>\nAssistant:"
        with ReflectionClient(f"unix:{shard}-0", service) as client:
            if service == V3:
                image = client.message("Image", data=png(picture(1)), mimetype="image/png")
                chunks = [
                    client.message("InputChunk", text=before),
                    client.message("InputChunk", image=image),
                    client.message("InputChunk", text=behind),
                ]
                prompt = {"input_chunks": {"chunks": chunks}}
            else:
                prompt = {"inputs": f"{before}![]({data_url(picture(1))}){behind}"}
            asked = client.message(
                "Request", id=1, stopping_parameters={"max_new_tokens": TOKENS}, **prompt
            )
            batch = client.message("Batch", id=1, requests=[asked], size=1)
            heard = Heard()
            response = heard(client.Prefill(batch=batch))
            heard.run_out(client, response.batch)
        assert Tokenizer.load(model).decode(heard.ids[1]) == expected

    def test_python(self, model: Path, expected: str, tmp_path: Path) -> None:
        photo = tmp_path / "photo.png"
        photo.write_bytes(png(picture(1)))
        limits: Any = {"max_total_tokens": 512, "max_input_tokens": 480, "dtype": "float32"}
        with LLM(model, **limits) as llm:
            content = [
                {"type": "image", "image": picture(1)},
                {"type": "text", "text": QUESTION},
            ]
            (answer,) = llm.chat([{"role": "user", "content": content}], max_new_tokens=TOKENS)
            assert answer.text == expected
            prompt = f"<|im_start|>User:{IMAGE_TOKEN} {QUESTION}<end_of_utterance>\nAssistant:"
            asked = [
                {"prompt": prompt, "images": [image]}
                for image in (picture(1), photo.read_bytes(), photo, str(photo))
            ]
            answers = llm.generate(asked, max_new_tokens=TOKENS, add_special_tokens=False)
            assert {answer.text for answer in answers} == {expected}
            assert answers[0].cached_tokens > 0, "the image is in the prefix cache"


def test_the_image_matters(ai: openai.OpenAI) -> None:
    def first(image: Image.Image) -> float:
        answer = ask(ai, image, logprobs=True)
        return float(answer.choices[0].logprobs.content[0].logprob)

    assert first(picture(1)) == first(picture(1))
    assert first(picture(1)) != first(picture(2))


def test_rows_are_prompt_tokens(server: ServerProcess, ai: openai.OpenAI) -> None:
    one, two = ask(ai, picture(1)).usage, ask(ai, picture(1), picture(2)).usage
    body = {"messages": chat(picture(1))}
    counted = httpx.post(f"{server.url}/chat_tokenize", json=body, timeout=60).json()
    assert len(counted["tokenize_response"]) == one.prompt_tokens
    shown = [token for token in counted["tokenize_response"] if token["text"] == IMAGE_TOKEN]
    assert len(shown) == 5 * 4, "four tiles and the whole, of four rows each"
    assert two.prompt_tokens > one.prompt_tokens + len(shown)


def encoded(server: ServerProcess) -> float:
    """How often the encoder has run."""
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    name = "tgi_images_encoded_total"
    return float(next(line for line in lines if line.startswith(name)).split()[-1])


def test_a_second_turn_runs_no_encoder_and_computes_no_token_of_the_image(
    server: ServerProcess, ai: openai.OpenAI
) -> None:
    image, before = picture(5), encoded(server)
    first = ask(ai, image)
    assert encoded(server) == before + 1
    messages = [
        *chat(image),
        {"role": "assistant", "content": first.choices[0].message.content or "x"},
        {"role": "user", "content": "And now?"},
    ]
    second = ai.chat.completions.create(
        model="tgi", messages=messages, max_tokens=TOKENS, temperature=0
    )
    details = second.usage.prompt_tokens_details if second.usage else None
    assert details is not None
    # All but the last block, which the answer has filled.
    assert (details.cached_tokens or 0) >= first.usage.prompt_tokens - 32
    assert (details.cached_tokens or 0) >= 5 * 4, "the image begins the prompt"
    assert encoded(server) == before + 1


def test_the_list_of_models_says_what_one_sees(ai: openai.OpenAI) -> None:
    (model,) = ai.models.list()
    architecture: Any = (model.model_extra or {})["architecture"]
    assert architecture["input_modalities"] == ["text", "image"]
    assert architecture["output_modalities"] == ["text"]


def test_samples_share_an_image(ai: openai.OpenAI) -> None:
    answer = ask(ai, picture(1), n=3, extra_body={"temperature": 1.0, "seed": 7})
    again = ask(ai, picture(1), n=3, extra_body={"temperature": 1.0, "seed": 7})
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1


def test_bench_sends_images(
    server: ServerProcess, shard: Path, model: Path, tmp_path: Path
) -> None:
    def bench(*arguments: str) -> BenchRun:
        path = tmp_path / "run.json"
        command = [sys.executable, "-m", "tgi_cli", "bench", "--ui", "none", "--output", str(path)]
        subprocess.run([*command, *arguments], check=True, timeout=120)
        return saved_runs.load(path)

    load = ("--concurrency", "2", "--requests", "6", "--warmups", "1")
    lengths = ("--input-tokens", "16", "--output-tokens", "4")
    for route in ("chat", "tgi"):
        images = ("--images", "1x56x56:0.5", "--route", route)
        run = bench("--url", server.url, *load, *lengths, *images)
        assert run.workload["images"] == "1x56x56:0.5"
        (metrics,) = (step_metrics(record, intervals=False) for record in run.steps)
        assert (metrics.succeeded, metrics.failed) == (6, 0)
        assert metrics.image_tokens >= 6 * 5 * 4, "four tiles and the whole, of four rows each"
        # A word is several tokens of the miniature: prompts are not as long as asked for.
        assert 0 < metrics.input_tokens - metrics.image_tokens <= 6 * 16
    run = bench(
        *("-m", f"{shard}-0", "-t", str(model), "-b", "2", "-s", "4", "-d", "3", "-r", "2"),
        *("--images", "2x56x28"),
    )
    assert len(run.steps[0].batches) == 3
    assert "a shard does not report the tokens of images" in run.notes[0]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png;base64,YWJj", "unsupported_image_media_type"),
        ("http://127.0.0.1/a.png", "failed_to_download_image"),
    ],
)
def test_errors_leave_the_server_as_it_was(
    ai: openai.OpenAI, expected: str, url: str, code: str
) -> None:
    part: Any = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(model="tgi", messages=[{"role": "user", "content": [part]}])
    assert caught.value.param == "messages"
    assert caught.value.code == code
    assert ask(ai, picture(1)).choices[0].message.content == expected
