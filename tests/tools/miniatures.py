"""What a miniature of the parity tests lacks to be quantized: a tokenizer; and its plain twin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tests.parity.cases import Case
from tests.parity.families import make_checkpoint
from tgi_cli.models.checkpoint import merge_quantized, read_headers, read_tensor
from tgi_cli.models.config import read_config
from tgi_cli.models.registry import checkpoint_format
from tgi_cli.models.stored_tensor import QUANTIZED


def make_miniature(case: Case, path: Path) -> Path:
    """The checkpoint of a case, with a tokenizer of bytes: its vocabulary is 256."""
    make_checkpoint(case, path)
    write_byte_tokenizer(path)
    return path


def write_byte_tokenizer(path: Path) -> None:
    """Write a tokenizer of the 256 bytes into a folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))


def make_twin(plain: Path, quantized: Path, out: Path) -> Path:
    """A float32 checkpoint of what the tensors of ``quantized`` stand for.

    ``plain`` is what it was made from: its layout is the twin's.
    """
    config = read_config(quantized)
    layout = checkpoint_format(config)
    transposed = config.get("model_type", str, "") == "gpt2"  # its plain weights are [in, out]
    assert layout is not None
    shapes = {name: entry.shape for name, entry in read_headers(plain).items()}
    tensors: dict[str, Tensor] = {}
    for name, entry in merge_quantized(read_headers(quantized), layout).items():
        if entry.dtype == QUANTIZED:
            assert entry.read is not None
            weight = entry.read(*map(read_tensor, entry.parts)).dequantize(torch.float32)
            tensors[name] = weight.T.contiguous() if transposed else weight
        else:
            tensors[name] = read_tensor(entry).float()
        assert tensors[name].shape == shapes[name], name
    out.mkdir()
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, out / file.name)
    raw = json.loads((plain / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | {"dtype": "float32"}))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
