"""Models behind URLs of object stores and web servers."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.gguf_models import demo_metadata, llama_gguf
from tests.tools.hub_server import Alter, Cut, HubServer, IgnoreRange, Refuse
from tests.tools.store_server import LISTING, Redirect, StoreServer
from tests.unit.hub.conftest import CONFIG, model, weights
from tgi_cli.errors import (
    ConfigError,
    CorruptFileError,
    DiskFullError,
    ExitCode,
    GatedModelError,
    HubError,
    ModelError,
    ModelNotFoundError,
    OfflineError,
)
from tgi_cli.hub import model_urls, parts_checksum
from tgi_cli.hub import remote_folder as remote
from tgi_cli.hub.open_remote import open_folder
from tgi_cli.hub.resolve import resolve_model

SECRET = "c2VjcmV0LWtleQ"
FIRST, SECOND, THIRD = SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def sharded() -> dict[str, bytes]:
    """A model of three files."""
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(SHARDS)}}
    files = {"config.json": CONFIG, "model.safetensors.index.json": json.dumps(index).encode()}
    return files | {name: weights(number) for number, name in enumerate(SHARDS)}


@pytest.fixture
def store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float | None]
) -> Iterator[StoreServer]:
    """A running stand-in that the environment points to, with an empty cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name in ("HTTP_PROXY", "http_proxy", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with StoreServer() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


@pytest.fixture(params=["s3", "web"])
def address(request: pytest.FixtureRequest, store: StoreServer) -> str:
    """The URL of the prefix ``models/m`` in the bucket, of either kind."""
    if request.param == "s3":
        pytest.importorskip("obstore")
        return "s3://bucket/models/m"
    return f"{store.url}/bucket/models/m"


def test_what_serving_needs_is_fetched_once(store: StoreServer, address: str) -> None:
    more = {"README.md": b"long", "modeling.py": b"import os", "pytorch_model.bin": b"pickle"}
    store.put_folder("bucket", "models/m", model() | more)
    store.put("bucket", "models/m2/config.json", b"another model")
    found = resolve_model(address)
    assert (found.model_id, len(found.revision)) == (address, 40)
    wanted = {"config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in found.path.iterdir()} == wanted
    assert (found.path / "model.safetensors").read_bytes() == weights()
    assert {key.removeprefix("models/m/") for key in store.fetched()} == wanted
    assert set(store.listings) <= {"models/m/"}, "nothing beyond the prefix is listed"
    store.seen.clear()
    assert resolve_model(address) == found
    assert store.seen == []
    assert resolve_model(address, weights=False).path == found.path
    assert resolve_model(f"{address}/").path == found.path


def test_three_shards_cut_in_the_middle_are_resumed_without_fetching_a_byte_twice(
    store: StoreServer, address: str
) -> None:
    files = sharded()
    store.put_folder("bucket", "models/m", files)
    key, size = f"models/m/{SECOND}", len(files[SECOND])
    store.fault(key, Cut(70_000))
    store.fault(key, Refuse(503), times=5)
    with pytest.raises(OfflineError, match=SECOND) as caught:
        resolve_model(address)
    assert caught.value.exit_code == ExitCode.MODEL_UNAVAILABLE
    assert "resumes" in caught.value.remedy

    path = resolve_model(address).path  # the next run
    for name, data in files.items():
        assert (path / name).read_bytes() == data
    assert sum(seen.sent for seen in store.requests(key)) == size
    assert store.ranges(key)[-1] == f"bytes=70000-{size - 1}"


def test_a_cut_within_a_run_is_resumed(store: StoreServer, address: str) -> None:
    data = model()["model.safetensors"]
    store.put_folder("bucket", "models/m", model())
    for after in (1000, 50_000):
        store.fault("models/m/model.safetensors", Cut(after))
    path = resolve_model(address).path
    assert (path / "model.safetensors").read_bytes() == data
    requests = store.requests("models/m/model.safetensors")
    assert sum(seen.sent for seen in requests) == len(data)


def test_an_object_that_was_replaced_is_not_continued_with(
    store: StoreServer, address: str
) -> None:
    store.put_folder("bucket", "models/m", model())
    key = "models/m/model.safetensors"
    store.fault(key, Cut(70_000))
    store.fault(key, Refuse(503), times=5)
    with pytest.raises(OfflineError):
        resolve_model(address)
    store.put("bucket", key, weights(seed=1))
    path = resolve_model(address).path
    assert (path / "model.safetensors").read_bytes() == weights(seed=1)
    assert store.ranges(key)[-1] in (None, f"bytes=0-{len(weights()) - 1}")


def test_an_object_that_is_replaced_meanwhile_is_told(
    store: StoreServer, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_folder("bucket", "models/m", model())
    key = "models/m/model.safetensors"
    store.fault(key, Cut(70_000))

    def replace_object(*_: object) -> float:
        store.put("bucket", key, weights(seed=1))
        return 0.0

    monkeypatch.setattr("tgi_cli.hub.client.retry_delay", replace_object)
    with pytest.raises(HubError, match=r"model\.safetensors of .* has changed"):
        resolve_model(address)
    path = resolve_model(address).path
    assert (path / "model.safetensors").read_bytes() == weights(seed=1)


def test_wrong_checksums_of_a_list_are_refused(store: StoreServer, address: str) -> None:
    files = model()
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
    store.put_folder("bucket", "models/m", files | {"SHA256SUMS": sums.encode()})
    store.fault("models/m/model.safetensors", Alter())
    path = resolve_model(address).path  # fetched a second time
    assert (path / "model.safetensors").read_bytes() == weights()

    store.put("bucket", "models/m/model.safetensors", weights(seed=1))
    (path / "model.safetensors").resolve().unlink()
    with pytest.raises(CorruptFileError, match="SHA256SUMS") as caught:
        resolve_model(address)
    assert caught.value.exit_code == ExitCode.MODEL_UNAVAILABLE
    assert "\n" not in caught.value.cause


def test_the_md5_in_an_etag_of_s3_is_verified(store: StoreServer) -> None:
    pytest.importorskip("obstore")
    store.put_folder("bucket", "m", model())
    key = "m/model.safetensors"
    store.fault(key, Alter())
    path = resolve_model("s3://bucket/m").path
    assert (path / "model.safetensors").read_bytes() == weights()
    assert len(store.requests(key)) == 2
    (path / "model.safetensors").resolve().unlink()
    store.fault(key, Alter(), times=2)
    with pytest.raises(CorruptFileError, match="ETag"):
        resolve_model("s3://bucket/m")
    # Of an object that the store encrypts, it looks the same and means nothing.
    store.put("bucket", key, weights(seed=2), encrypted=True)
    path = resolve_model("s3://bucket/m").path
    assert (path / "model.safetensors").read_bytes() == weights(seed=2)


def etag_of_parts(data: bytes, length: int) -> str:
    """As S3 gives it to an object that was uploaded in parts."""
    parts = [data[start : start + length] for start in range(0, len(data), length)]
    sums = b"".join(hashlib.md5(part).digest() for part in parts)
    return f'"{hashlib.md5(sums).hexdigest()}-{len(parts)}"'


def test_objects_that_were_uploaded_in_parts_are_verified_or_named(
    store: StoreServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("obstore")
    data, length = weights(), 1000
    monkeypatch.setattr(parts_checksum, "LENGTHS", (length - 1, length, length + 1))
    store.put_folder("bucket", "m", model())
    key = "m/model.safetensors"
    warnings = "could not be verified"
    store.put("bucket", key, data, etag=etag_of_parts(data, length))
    store.fault(key, Cut(1500))  # resumed within a part
    path = resolve_model("s3://bucket/m").path
    assert (path / "model.safetensors").read_bytes() == data
    assert warnings not in caplog.text
    for etag in (etag_of_parts(data, length - 300), etag_of_parts(data + b"x", length)):
        caplog.clear()
        store.put("bucket", key, data, etag=etag)
        path = resolve_model("s3://bucket/m").path
        assert (path / "model.safetensors").read_bytes() == data
        assert warnings in caplog.text, etag


def test_a_server_without_ranges_starts_over(store: StoreServer) -> None:
    store.put_folder("bucket", "m", model())
    key = "m/model.safetensors"
    store.fault(key, Cut(1000))
    store.fault(key, IgnoreRange())
    path = resolve_model(f"{store.url}/bucket/m").path
    assert (path / "model.safetensors").read_bytes() == weights()


def test_pickles_and_code_are_not_taken(store: StoreServer, address: str) -> None:
    files = {"config.json": CONFIG, "pytorch_model.bin": b"\x80", "modeling.py": b"import os"}
    store.put_folder("bucket", "models/m", files)
    with pytest.raises(ModelError, match=r"pickles|has no \.safetensors weights"):
        resolve_model(address)
    with pytest.raises(ConfigError, match="only safetensors"):
        resolve_model(address, extension=".bin")
    assert store.fetched() <= {"models/m/config.json"}


def test_a_full_disk_is_told_before_the_first_byte(
    store: StoreServer, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_folder("bucket", "models/m", model())
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(DiskFullError):
        resolve_model(address)
    assert store.seen == []


def test_an_unreachable_store_falls_back_to_the_cache(
    store: StoreServer, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_folder("bucket", "models/m", model())
    found = resolve_model(address)

    def lost(folder: object) -> None:
        raise OfflineError("cannot read the list of files")

    monkeypatch.setattr("tgi_cli.hub.remote_model.call_with_retries", lost)
    assert resolve_model(address).path == found.path
    (found.path / "model.safetensors").unlink()
    with pytest.raises(OfflineError):
        resolve_model(address)


def test_credentials_are_in_no_message(
    store: StoreServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    store.put_folder("bucket", "m", model())
    store.access_key = "AKIAOTHER"
    with pytest.raises(GatedModelError, match="access is denied") as denied:
        resolve_model("s3://bucket/m")
    store.access_key = None
    store.fault(LISTING, Refuse(503), times=5)
    with pytest.raises(OfflineError) as busy:
        resolve_model("s3://bucket/m")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(OfflineError) as unreachable:
        resolve_model("s3://bucket/m")
    for caught in (denied, busy, unreachable):
        shown = f"{caught.value} {caught.value.remedy} {caplog.text}"
        assert SECRET not in shown
        assert "Signature=" not in shown
        assert "\n" not in caught.value.cause
    assert "AWS_ACCESS_KEY_ID" in denied.value.remedy
    with pytest.raises(ConfigError, match="credentials") as named:
        resolve_model(f"https://user:{SECRET}@host/model")
    assert SECRET not in str(named.value)


def test_netrc_is_for_its_host_alone(
    store: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_folder("bucket", "m", model())
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login user password {SECRET}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    elsewhere = store.url.replace("127.0.0.1", "localhost")
    store.put_folder("bucket", "elsewhere", model())
    key = "m/model.safetensors"
    store.fault(key, Redirect(f"{elsewhere}/bucket/elsewhere/model.safetensors"))
    path = resolve_model(f"{store.url}/bucket/m").path
    assert (path / "model.safetensors").read_bytes() == weights()
    (first,), (second,) = store.requests(key), store.requests("elsewhere/model.safetensors")
    assert first.authorization is not None
    assert second.authorization is None


def test_a_gguf_file_is_served_from_a_url(store: StoreServer, address: str, tmp_path: Path) -> None:
    data = llama_gguf(tmp_path / "made.gguf", demo_metadata()).read_bytes()
    store.put("bucket", "models/m/tiny-F32.gguf", data)
    found = resolve_model(f"{address}/tiny-F32.gguf")
    assert (found.path / "config.json").is_file()
    if address.startswith("s3://"):
        assert resolve_model(f"{address}:F32").path == found.path
        with pytest.raises(ModelNotFoundError, match="no GGUF file for 'Q8_0'"):
            resolve_model(f"{address}:Q8_0")


def test_nothing_there_is_told(store: StoreServer, address: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no model at"):
        resolve_model(address)


def test_the_scheme_of_the_hub(hub: HubServer) -> None:
    hub.add("org/m", model(), revisions={"main", "v1"})
    found = resolve_model("hf://org/m@v1")
    assert found.model_id == "org/m"
    assert resolve_model("hf://org/m") == found
    with pytest.raises(ConfigError, match="another revision"):
        resolve_model("hf://org/m@v1", revision="main")


@pytest.mark.parametrize(
    ("model_id", "expected"),
    [
        ("s3://b/p", True),
        ("gs://b", True),
        ("https://host/m", True),
        ("https://huggingface.co/org/m", False),
        ("https://hf.co/org/m:Q4_K_M", False),
        ("hf://org/m", False),
        ("org/m", False),
        ("./s3:", False),
    ],
)
def test_urls_are_told_from_ids(model_id: str, expected: bool) -> None:
    assert model_urls.is_remote(model_id) == expected


@pytest.mark.parametrize("url", ["https://host", "https://host/m?token=1", "s3:///m"])
def test_urls_that_name_no_folder_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        model_urls.split_url(url)


def test_a_transfer_stops(store: StoreServer) -> None:
    store.put_folder("bucket", "m", model())
    folder = open_folder(f"{store.url}/bucket/m")
    file = folder.files()["model.safetensors"]
    stop = threading.Event()

    def write(block: memoryview) -> None:
        stop.set()

    assert remote.receive(folder, file, 0, file.size, write, stop) <= file.size
    assert remote.receive(folder, file, 0, file.size, write, stop) == 0
    folder.close()
