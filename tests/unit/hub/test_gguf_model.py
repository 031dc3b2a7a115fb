"""GGUF files: from the stand-in hub and from disk to folders that can be served."""

from __future__ import annotations

import json
import logging
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.gguf_models import (
    demo_metadata,
    llama_gguf,
    spm_metadata,
)
from tests.tools.hub_server import Alter, Cut, HubServer
from tests.unit.hub.conftest import model
from tgi_cli import demo
from tgi_cli.errors import (
    ConfigError,
    CorruptFileError,
    ExitCode,
    ModelError,
    ModelNotFoundError,
    OfflineError,
    TgiError,
    UnsupportedModelError,
)
from tgi_cli.gguf.model_folder import write_model_folder
from tgi_cli.gguf.reader import read_gguf
from tgi_cli.gguf.values import Value
from tgi_cli.gguf.writer import write_gguf
from tgi_cli.hub.resolve import resolve_model
from tgi_cli.text.bundle import TextBundle

Q4, Q8 = "m-Q4_K_M.gguf", "m-Q8_0.gguf"


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    """A miniature Llama with SentencePiece's kind of tokenizer."""
    return llama_gguf(tmp_path / "made.gguf").read_bytes()


def demo_data(tmp_path: Path, **more: Value) -> bytes:
    """One with the bundled model's tokenizer."""
    return llama_gguf(tmp_path / "demo.gguf", demo_metadata(), **more).read_bytes()


def read_json(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text())
    return found


def test_a_tag_is_downloaded_alone_and_served_with_what_its_metadata_say(
    hub: HubServer, tmp_path: Path
) -> None:
    data = demo_data(tmp_path, general__sampling__temp=0.5, general__sampling__top_k=7)
    commit = hub.add("org/m", {Q4: data, Q8: data, "README.md": b"x", "config.json": b"{}"})
    found = resolve_model("org/m:q8_0")
    assert (found.model_id, found.revision) == ("org/m:q8_0", commit)
    assert hub.fetched() == {Q8, "config.json"}
    assert sorted(path.name for path in found.path.iterdir()) == [
        "config.json",
        "generation_config.json",
        Q8,
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (found.path / Q8).read_bytes() == data
    config = read_json(found.path / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == 4096
    generation = read_json(found.path / "generation_config.json")
    assert generation["eos_token_id"] == [2, 0]
    assert (generation["temperature"], generation["top_k"]) == (0.5, 7)
    text = TextBundle.load(found.path)
    original = TextBundle.load(demo.model_path())
    assert text.tokenizer.encode("Hello there") == original.tokenizer.encode("Hello there")
    assert text.chat_template is not None
    assert original.chat_template is not None
    messages = [{"role": "user", "content": "hi"}]
    assert text.chat_template.render(messages) == original.chat_template.render(messages)
    for bundle in (text, original):
        assert bundle.chat_template is not None
        bundle.chat_template.pool.close()


def test_a_repository_with_gguf_alone_needs_no_tag(hub: HubServer, data: bytes) -> None:
    hub.add("org/m", {Q4: data, Q8: data})
    assert (resolve_model("org/m").path / Q4).is_file()
    assert (resolve_model("hf.co/org/m:latest").path / Q4).is_file()
    plain = model()
    del plain["tokenizer.json"]
    hub.add("org/both", plain | {Q4: data})
    assert (resolve_model("org/both").path / "model.safetensors").is_file()
    assert (resolve_model("org/both:Q4_K_M").path / Q4).is_file()


def test_parts_in_a_folder_are_one_model(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = spm_metadata()
    parts = []
    for number in range(2):
        split: dict[str, Value] = {"split.no": number, "split.count": 2}
        path = tmp_path / f"{number}.gguf"
        if number:
            write_gguf(path, split, [])
        else:
            llama_gguf(path, tokenizer | split)
        parts.append(path.read_bytes())
    names = [f"Q4_0/m-Q4_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.add("org/m", dict(zip(names, parts, strict=True)) | {"mmproj-F16.gguf": b"GGUF"})
    with caplog.at_level(logging.INFO):
        found = resolve_model("org/m:Q4_0")
    assert hub.fetched() == set(names)
    assert [(found.path / name.rpartition("/")[2]).is_file() for name in names] == [True, True]
    assert "mmproj-F16.gguf is ignored: images are not supported" in caplog.text


def test_a_miss_lists_tags_and_sizes_and_downloads_nothing(hub: HubServer, data: bytes) -> None:
    hub.add("org/m", {Q4: data, Q8: data})
    with pytest.raises(ModelNotFoundError, match="no GGUF file for 'Q5_0'") as caught:
        resolve_model("org/m:Q5_0")
    assert caught.value.exit_code == ExitCode.MODEL_UNAVAILABLE
    assert caught.value.remedy.startswith("name one of Q4_K_M (")
    assert hub.seen == []


def test_a_cut_download_resumes_and_serves_offline(
    hub: HubServer, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/m", {Q4: data, Q8: data})
    hub.fault(Q4, Cut(after=1000))
    found = resolve_model("org/m:Q4_K_M")
    assert hub.ranges(Q4) == [None, "bytes=1000-"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model("org/m:Q4_K_M").path == found.path
    with pytest.raises(OfflineError, match="HF_HUB_OFFLINE"):
        resolve_model("org/m:Q8_0")


def test_a_wrong_checksum_is_an_error(hub: HubServer, data: bytes) -> None:
    hub.add("org/m", {Q4: data})
    hub.fault(Q4, Alter(), times=2)
    with pytest.raises(CorruptFileError, match="wrong checksum"):
        resolve_model("org/m")


def lie(data: bytes, what: str) -> bytes:
    """The file with a header that states more than there is, or without its end."""
    if what == "truncated":
        return data[:-100]
    if what == "tensors":
        return data[:8] + struct.pack("<Q", 1 << 60) + data[16:]
    if what == "keys":
        return data[:16] + struct.pack("<Q", 1 << 60) + data[24:]
    if what == "text":
        return data[:24] + struct.pack("<Q", 1 << 62) + data[32:]
    key = b"tokenizer.ggml.tokens"
    at = data.index(key) + len(key) + 8
    return data[:at] + struct.pack("<Q", 1 << 62) + data[at + 8 :]


@pytest.mark.parametrize("what", ["truncated", "tensors", "keys", "text", "array"])
def test_files_that_lie_are_one_line(hub: HubServer, data: bytes, what: str) -> None:
    hub.add("org/m", {Q4: lie(data, what)})
    with pytest.raises(CorruptFileError) as caught:
        resolve_model("org/m")
    assert caught.value.exit_code == ExitCode.MODEL_UNAVAILABLE
    assert Q4 in caught.value.cause
    assert "\n" not in caught.value.cause + caught.value.remedy


def test_a_local_file_is_a_model(hub: HubServer, data: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / Q4).write_bytes(data)
    found = resolve_model(str(folder / Q4))
    assert (found.model_id, found.revision) == (str(folder / Q4), "")
    text = TextBundle.load(found.path)
    assert text.tokenizer.encode("the") == [1, *text.tokenizer.encode("the", False)]
    assert text.chat_template is None
    assert resolve_model(str(folder / Q4)).path == found.path
    assert resolve_model(str(folder)).path == found.path
    assert resolve_model(f"{folder}:Q4_K_M").path == found.path
    assert resolve_model(str(found.path)).path == found.path
    (folder / Q4).write_bytes(demo_data(tmp_path))
    assert resolve_model(str(folder / Q4)).path != found.path
    with pytest.raises(ModelNotFoundError, match="Q8_0"):
        resolve_model(f"{folder}:Q8_0")


def test_files_beside_it_take_precedence(hub: HubServer, data: bytes, tmp_path: Path) -> None:
    tokenizer = (demo.model_path() / "tokenizer.json").read_bytes()
    config = json.dumps({"chat_template": "own {{ messages[0].content }}"}).encode()
    generation = json.dumps({"temperature": 0.25}).encode()
    beside = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "generation_config.json": generation,
    }
    hub.add("org/m", {Q4: demo_data(tmp_path, general__sampling__temp=0.5)} | beside)
    path = resolve_model("org/m").path
    assert (path / "tokenizer.json").read_bytes() == tokenizer
    assert read_json(path / "tokenizer_config.json") == json.loads(config)
    assert read_json(path / "generation_config.json")["temperature"] == 0.25
    assert read_json(path / "generation_config.json")["eos_token_id"] == [2, 0]

    hub.add("org/other", {Q4: data} | beside)
    with pytest.raises(CorruptFileError, match="another model's") as caught:
        resolve_model("org/other")
    assert "--tokenizer-name" in caught.value.remedy

    # Of a folder with several models, the files beside them may belong to any of them.
    folder = tmp_path / "downloads"
    folder.mkdir()
    for name, content in ({Q4: data, "other.gguf": data} | beside).items():
        (folder / name).write_bytes(content)
    own = resolve_model(str(folder / Q4)).path
    assert read_json(own / "generation_config.json").keys() == {"eos_token_id", "bos_token_id"}


def test_a_template_beside_it_goes_with_the_tokenizer_of_the_metadata(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.add("org/m", {Q4: demo_data(tmp_path), "chat_template.jinja": b"{{ messages }}"})
    path = resolve_model("org/m").path
    assert (path / "chat_template.jinja").read_text() == "{{ messages }}"
    assert "chat_template" not in read_json(path / "tokenizer_config.json")
    assert (path / "tokenizer.json").is_file()


def test_a_tokenizer_can_be_forced(hub: HubServer, data: bytes, tmp_path: Path) -> None:
    tokenizer = (demo.model_path() / "tokenizer.json").read_bytes()
    hub.add("org/base", model(tokenizer__json=tokenizer))
    unknown = llama_gguf(tmp_path / "x.gguf", demo_metadata(pre="martian")).read_bytes()
    hub.add("org/m", {Q4: unknown})
    with pytest.raises(UnsupportedModelError, match="unknown pre-tokenizer 'martian'"):
        resolve_model("org/m")
    forced = resolve_model("org/m", tokenizer="org/base")
    assert (forced.path / "tokenizer.json").read_bytes() == tokenizer
    assert "model.safetensors" not in hub.fetched()

    # As TGI's llama.cpp backend: the model names the tokenizer, a file the weights.
    both = resolve_model("org/base", gguf=str(tmp_path / "x.gguf"))
    assert both.model_id == "org/base"
    assert (both.path / "tokenizer.json").read_bytes() == tokenizer
    alone = resolve_model("", gguf="org/m:Q4_K_M", tokenizer=str(demo.model_path()))
    assert alone.model_id == "org/m:Q4_K_M"
    with pytest.raises(ModelError, match="no tokenizer in"):
        resolve_model("org/m", tokenizer=str(tmp_path))
    with pytest.raises(ConfigError, match="--tokenizer-name applies to GGUF files"):
        resolve_model("org/base", tokenizer="org/base")


def test_a_token_without_an_embedding_is_an_error(tmp_path: Path) -> None:
    metadata = spm_metadata()
    file = read_gguf(llama_gguf(tmp_path / "m.gguf", metadata))
    tokens = file.values("tokenizer.ggml.tokens", str)
    longer = {"tokenizer.ggml.tokens": [*tokens, "new"]}
    why = f"has {len(tokens) + 1} tokens, and embeddings of {len(tokens)}"
    (tmp_path / "out").mkdir()
    with pytest.raises(CorruptFileError, match=why):
        write_model_folder(replace(file, metadata={**file.metadata, **longer}), tmp_path / "out")


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"general__architecture": "clip"}, "encodes images"),
        ({"general__architecture": "martian"}, "'martian', which is not supported as GGUF"),
        ({"llama__block_count": 0}, "llama.block_count"),
    ],
)
def test_models_that_cannot_be_served_are_named(
    hub: HubServer, tmp_path: Path, more: dict[str, Value], complaint: str
) -> None:
    path = llama_gguf(tmp_path / "m.gguf", None, **more)
    with pytest.raises(TgiError, match=complaint) as caught:
        resolve_model(str(path))
    assert caught.value.exit_code == ExitCode.MODEL_UNUSABLE
    assert not list((tmp_path / "tgi-gguf").glob("m-*"))
