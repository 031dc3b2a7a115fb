"""Models in a real server of S3's interface: moto's, as a process."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import torch

from tests.system.clients.environment import INSTALL_SECONDS, make_environment
from tests.system.conftest import StartServer
from tests.tools.checkpoints import make_llama
from tests.tools.cutting_proxy import CuttingProxy
from tests.tools.server_process import free_ports, poll, stop
from tgi_cli import demo
from tgi_cli.errors import CorruptFileError
from tgi_cli.hub.resolve import resolve_model

obstore = pytest.importorskip("obstore")

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(INSTALL_SECONDS + 300)]

REQUIREMENTS = Path(__file__).with_name("servers") / "moto.txt"
SECONDS = 120.0
PART = 5 << 20
"""Length of the parts of an upload, the least that S3 takes."""
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def store(environments: Path) -> Iterator[dict[str, str]]:
    """The variables of a store with an empty bucket ``models``."""
    python = make_environment(environments, REQUIREMENTS)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [str(python.with_name("moto_server")), "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        poll(lambda: answers(url), SECONDS, "moto answers")
        assert httpx.put(f"{url}/models", timeout=SECONDS).status_code == 200
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "AKIATEST",
            "AWS_SECRET_ACCESS_KEY": "c2VjcmV0",
            "AWS_REGION": "us-east-1",
        }
    finally:
        stop(server)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=SECONDS).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def model(store: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of three shards, of which ``s3://models/m`` is a copy."""
    path = make_llama(
        tmp_path_factory.mktemp("model"),
        dtype=torch.bfloat16,
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        files=3,
        tokenizer=demo.model_path(),
    )
    put(store, path, "m")
    return path


def put(store: dict[str, str], path: Path, prefix: str, **more: bytes) -> None:
    """Upload a model's files; shards in parts, but the first."""
    options = {"client_options": {"allow_http": True}}
    bucket = obstore.store.S3Store("models", prefix=prefix, config=s3_config(store), **options)
    files = {file.name: file.read_bytes() for file in path.iterdir()} | more
    for name, data in files.items():
        parts = {"use_multipart": True, "chunk_size": PART} if name in SHARDS[1:] else {}
        assert not parts or len(data) > PART
        obstore.put(bucket, name, data, **parts)


def s3_config(store: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in store.items()}


@pytest.fixture
def proxy(
    store: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CuttingProxy]:
    """In front of the store, in this process's environment, with an empty cache."""
    port = urlsplit(store["AWS_ENDPOINT_URL"]).port
    assert port is not None
    with CuttingProxy(port) as proxy:
        for name, value in (store | {"AWS_ENDPOINT_URL": proxy.url}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
        monkeypatch.setattr("tgi_cli.hub.client.INITIAL_DELAY", 0.01)
        yield proxy


def test_a_transfer_that_is_cut_is_resumed_and_verified(
    model: Path, proxy: CuttingProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.cut_after = 3_000_000
    with caplog.at_level("INFO", "tgi_cli"):
        found = resolve_model("s3://models/m").path
    assert proxy.cuts == 1
    assert "trying again" in caplog.text
    for name in SHARDS:
        assert (found / name).read_bytes() == (model / name).read_bytes()
    whole = sum(file.stat().st_size for file in model.iterdir())
    assert whole < proxy.brought < whole + 1_000_000, "nearly no byte was fetched twice"
    assert "verified" not in caplog.text, "ETags of both kinds were checked"
    brought = proxy.brought
    assert resolve_model("s3://models/m").path == found
    assert proxy.brought < brought + 100_000, "the list of files alone"


def test_a_wrong_checksum_is_refused(
    store: dict[str, str], model: Path, proxy: CuttingProxy
) -> None:
    wrong = {"SHA256SUMS": f"{'0' * 64}  {SHARDS[1]}\n".encode()}
    put(store, model, "wrong", **wrong)
    with pytest.raises(CorruptFileError, match=f"{SHARDS[1]} of s3://models/wrong"):
        resolve_model("s3://models/wrong")


def test_a_model_is_served(
    model: Path, store: dict[str, str], start_server: StartServer, tmp_path: Path
) -> None:
    """From a folder, from a copy on the disk, and read into memory without one."""
    variables = store | {"HF_HUB_CACHE": str(tmp_path / "hub")}
    body = {"inputs": "import os", "parameters": {"max_new_tokens": 12}}
    texts = []
    for server in (
        start_server(str(model)),
        start_server("s3://models/m", **variables),
        start_server("s3://models/m", "--load-format", "stream", **variables),
    ):
        server.wait_ready()
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=SECONDS).json()
        texts.append(answer["generated_text"])
        server.kill()
    assert texts == [texts[0]] * 3
