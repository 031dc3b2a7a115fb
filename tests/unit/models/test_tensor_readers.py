"""Weights that threads read ahead: the same tensors, within a limit of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tools.checkpoints import make_llama
from tgi_cli.errors import CheckpointError
from tgi_cli.models import load_model, read_config, tensor_readers, weight_filling
from tgi_cli.models.checkpoint import read_headers
from tgi_cli.models.stored_tensor import StoredTensor
from tgi_cli.models.tensor_readers import MappedReader, ReadAhead

TENSORS = {
    "a": torch.randn(33, 7),
    "b": torch.randn(5, 4).bfloat16(),
    "c": torch.randint(-100, 100, (70,), dtype=torch.int8),
    "d": torch.tensor([[True, False]]),
    "e": torch.randn(3, 3).to(torch.float8_e4m3fn),
    "f": torch.empty(0, 4),
    "g": torch.randn(2, 3, 4).double(),
    "h": torch.tensor(5, dtype=torch.int64),
    "i": torch.tensor([1, 2, 65535], dtype=torch.uint16),
}


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, StoredTensor]:
    """In one file each for two of them, by name."""
    found: dict[str, StoredTensor] = {}
    names = sorted(TENSORS)
    for number in range(0, len(names), 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        part = {name: TENSORS[name] for name in names[number : number + 2]}
        save_file(part, folder / "model.safetensors")
        found |= read_headers(folder)
    return found


def same(found: Tensor, expected: Tensor) -> bool:
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(found.contiguous().view(-1).view(torch.uint8), bits_of(expected))
    )


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class LocalRanges:
    """In place of a :class:`tgi_cli.hub.streamed_model.RangeReader`, over files of this machine."""

    def __init__(self) -> None:
        self.closed = False

    def read_into(self, target: memoryview, file: Path, offset: int) -> None:
        target[:] = file.read_bytes()[offset : offset + len(target)]

    def close(self) -> None:
        self.closed = True


def test_streamed_tensors_are_those_of_the_files(stored: dict[str, StoredTensor]) -> None:
    ranges = LocalRanges()
    names = [name for name in TENSORS if name != "i"]
    reader = ReadAhead([stored[name] for name in names], pin=False, remote=cast(Any, ranges))
    found = [reader.read(stored[name]) for name in names]
    with pytest.raises(CheckpointError, match="--load-format stream does not read"):
        reader.read(stored["i"])
    reader.close()
    assert ranges.closed
    for tensor, name in zip(found, names, strict=True):
        assert same(tensor, TENSORS[name]), "also after the reader is closed"


@pytest.mark.parametrize("part_bytes", [3, 1 << 20])
@pytest.mark.parametrize("ahead", [1, 50, 1 << 20])
def test_threads_read_what_the_files_have(
    stored: dict[str, StoredTensor], monkeypatch: pytest.MonkeyPatch, part_bytes: int, ahead: int
) -> None:
    monkeypatch.setattr(tensor_readers, "_PART_BYTES", part_bytes)
    monkeypatch.setattr(tensor_readers, "_AHEAD_BYTES", ahead)
    order = ["g", "a", "i", "f", "b", "h", "c", "e", "d", "a"]
    reader = ReadAhead((stored[name] for name in order), pin=False)
    try:
        for name in order:
            assert same(reader.read(stored[name]), TENSORS[name]), name
    finally:
        reader.close()
        reader.close()


def test_no_more_is_read_ahead_than_the_limit(
    stored: dict[str, StoredTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_readers, "_AHEAD_BYTES", TENSORS["a"].nbytes + 1)
    asked: list[str] = []

    def wanted():  # type: ignore[no-untyped-def]
        for name in ("a", "b", "c", "d"):
            asked.append(name)
            yield stored[name]

    reader = ReadAhead(wanted(), pin=False)
    assert asked == []
    reader.read(stored["a"])
    assert asked == ["a", "b"], "the one that exceeds the limit is the last"
    reader.read(stored["b"])
    assert asked == ["a", "b", "c", "d"]
    reader.close()


def test_another_order_is_an_error(stored: dict[str, StoredTensor]) -> None:
    reader = ReadAhead([stored["a"], stored["b"]], pin=False)
    with pytest.raises(ValueError, match="b is read where a was expected"):
        reader.read(stored["b"])
    reader.close()


def test_a_file_that_ends_early_is_named(
    stored: dict[str, StoredTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while another program writes it: its header was right when it was read."""
    file = stored["g"].file
    header = tensor_readers.file_header(file)
    monkeypatch.setattr(tensor_readers, "file_header", lambda _: header)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    reader = ReadAhead([stored["g"], stored["h"]], pin=False)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: it ends"):
        reader.read(stored["g"])
    reader.close()


def test_mapped_tensors_outlive_their_mapping(
    stored: dict[str, StoredTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_readers, "_MAPPED_BYTES", 1)
    reader = MappedReader()
    found = {name: reader.read(each) for name, each in stored.items()}
    reader.close()
    for name, tensor in found.items():
        assert same(tensor, TENSORS[name])


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_the_same_however_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    make_llama(tmp_path, files=3, tie_word_embeddings=tied)
    config, made = read_config(tmp_path), []

    class Watched(ReadAhead):
        def read(self, stored: StoredTensor) -> Tensor:
            made.append(stored.name)
            return super().read(stored)

    found = []
    for kinds in (frozenset[str](), frozenset({"cpu"})):
        monkeypatch.setattr(weight_filling, "READS_AHEAD", kinds)
        monkeypatch.setattr(weight_filling, "ReadAhead", Watched)
        model = load_model(config, torch.float32, torch.device("cpu"))
        found.append(dict(model.named_parameters()))
    assert made
    assert set(found[0]) == set(found[1])
    for name, parameter in found[0].items():
        assert torch.equal(parameter, found[1][name]), name
