"""Writes a model as a GGUF file, with its linear layers as Q8_0 or Q4_0."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tgi_cli.errors import ConfigError, UnsupportedModelError
from tgi_cli.gguf.values import Value
from tgi_cli.gguf.writer import TensorSource, write_gguf
from tgi_cli.models.checkpoint import read_headers, read_tensor
from tgi_cli.models.config import read_config
from tgi_cli.process.progress import ProgressReporter
from tgi_cli.quantize.gguf_blocks import BLOCK, ENCODERS
from tgi_cli.quantize.gguf_names import GGUFLayout
from tgi_cli.quantize.gguf_tokenizer import tokenizer_metadata
from tgi_cli.quantize.gptq import LayerReport
from tgi_cli.quantize.options import QuantizeOptions
from tgi_cli.quantize.pipeline import QuantizeResult

log = logging.getLogger(__name__)

_TYPES = {4: "Q4_0", 8: "Q8_0"}
_FILE_TYPES = {"Q4_0": 2, "Q8_0": 7}
_FILE_TYPE_VERSION = 2
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_TABLES = ("token_embd.weight", "output.weight")
_CHUNK = 1 << 22
"""Numbers that are rounded at once."""

_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def check_options(options: QuantizeOptions) -> str:
    """The type of blocks that the options ask for.

    Raises:
        ConfigError: an option has no effect on GGUF, or a value that it has no type for.
    """
    if options.method not in (None, "rtn"):
        raise ConfigError(
            f"--format gguf has no --method {options.method}", "leave it out, or give rtn"
        )
    if (options.bits or 4) not in _TYPES:
        raise ConfigError(f"--format gguf has no {options.bits} bits", "give --bits 4 or 8")
    if options.group_size not in (None, BLOCK):
        raise ConfigError(f"GGUF's scales are those of {BLOCK} inputs", "leave out --groupsize")
    unused = {
        "--asym": options.sym is False,
        "--act-order": options.act_order,
        "--static-groups": options.static_groups,
        "--group-aware": bool(options.group_aware),
        "--mse": options.mse,
        "--calibration": options.calibration is not None,
        "--evaluate": options.evaluate,
        "--resume": options.resume,
        "--backend gptqmodel": options.backend != "builtin",
    }
    for flag, given in unused.items():
        if given:
            raise ConfigError(f"{flag} has no effect on --format gguf", "leave it out")
    return _TYPES[options.bits or 4]


def output_path(options: QuantizeOptions, kind: str) -> Path:
    """The file to write: OUTPUT_DIR itself if it ends in .gguf, else one of that name in it.

    Raises:
        ConfigError: it exists.
    """
    assert options.output_dir is not None
    path = options.output_dir
    if path.suffix.lower() != ".gguf":
        path = path / f"{path.resolve().name}-{kind}.gguf"
    if path.exists():
        raise ConfigError(f"{path} exists", "name another one")
    return path


def quantize_to_gguf(
    model: Path, options: QuantizeOptions, progress: ProgressReporter
) -> QuantizeResult:
    """Write the checkpoint in a folder as a file, one tensor after the other.

    Embedding and head get 8 bits. Norms, biases, and layers that are excluded or have no multiple
    of 32 inputs stay as they are. The same model and options give the same bytes.

    Raises:
        ConfigError: as :func:`check_options` and :func:`output_path`; a pattern matches nothing.
        UnsupportedModelError: the architecture, or the tokenizer, cannot be written.
        CheckpointError, ModelError: the model cannot be read.
    """
    began = time.monotonic()
    kind = check_options(options)
    path = output_path(options, kind)
    config = read_config(model)
    if config.quantization is not None:
        raise ConfigError(
            "the model is already quantized", "name the checkpoint that it was made from"
        )
    writer = _Writer(model, GGUFLayout(config.raw), kind, options, progress)
    tensors = writer.tensors()
    metadata = _metadata(model, writer.layout, options, kind)
    partial_path = path.with_name(f"{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with torch.no_grad(), progress:
            progress.start("quantizing", len(tensors))
            write_gguf(partial_path, metadata, tensors)
        partial_path.rename(path)
    finally:
        partial_path.unlink(missing_ok=True)
    return QuantizeResult(
        path,
        tuple(LayerReport(name, float("nan")) for name in writer.quantized),
        tuple(writer.ignored),
        path.stat().st_size,
        None,
        time.monotonic() - began,
        "",
    )


def _metadata(
    model: Path, layout: GGUFLayout, options: QuantizeOptions, kind: str
) -> dict[str, Value]:
    name = options.model_id.rstrip("/").rpartition("/")[2]
    metadata: dict[str, Value] = {
        "general.architecture": layout.architecture,
        "general.type": "model",
        "general.name": name,
        "general.quantization_version": _FILE_TYPE_VERSION,
        "general.file_type": _FILE_TYPES[kind],
    }
    generation = read_config(model).generation
    for key, ours in _SAMPLING.items():
        value = generation.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            metadata[f"general.sampling.{ours}"] = value if key == "top_k" else float(value)
    return metadata | layout.keys() | tokenizer_metadata(model, int(layout.config["vocab_size"]))


class _Writer:
    """The tensors of a file.

    Attributes:
        quantized: names of layers with 4 or 8 bits.
        ignored: names of other linear layers.
    """

    def __init__(
        self,
        model: Path,
        layout: GGUFLayout,
        kind: str,
        options: QuantizeOptions,
        progress: ProgressReporter,
    ) -> None:
        self.layout = layout
        self.kind = kind
        self.options = options
        self.progress = progress
        self.stored = read_headers(model)
        self.quantized: list[str] = []
        self.ignored: list[str] = []

    def tensors(self) -> list[TensorSource]:
        """All tensors, in the order of the checkpoint."""
        groups: dict[str, list[str]] = {}
        for stored in self.stored:
            if (name := self.layout.name(stored)) is not None:
                groups.setdefault(name, []).append(stored)
        found = [self._source(*group) for group in groups.items()]
        for name, factors in self.layout.rope_tensors().items():
            read = partial(_bytes, factors)
            found.append(TensorSource(name, tuple(factors.shape), "F32", read))
        names = [*self.quantized, *self.ignored]
        for flag, patterns in (
            ("--include", self.options.include),
            ("--exclude", self.options.exclude),
        ):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ConfigError(
                        f"{flag} {pattern!r} matches no layer", f"names are like {names[0]}"
                    )
        return found

    def _source(self, name: str, group: list[str]) -> TensorSource:
        """A tensor of one of the checkpoint, or of those of all experts in their order."""
        experts = {self.layout.expert(stored): stored for stored in group}
        is_stack = None not in experts
        if is_stack:
            group = [experts[expert] for expert in range(len(group)) if expert in experts]
        tensor = self.stored[group[0]]
        if len(group) != len(experts) or any(self.stored[e].shape != tensor.shape for e in group):
            raise UnsupportedModelError(f"the experts of {name} are not all there, or differ")
        kinds = {self._kind(stored, name, tensor.shape) for stored in group}
        if len(kinds) > 1:
            raise ConfigError(
                f"--include and --exclude choose some experts of {name}, which are one tensor",
                "choose all of them with *",
            )
        kind = kinds.pop() or (tensor.dtype if tensor.dtype in _DTYPES else "F32")
        shape = (len(group), *tensor.shape) if is_stack else tensor.shape
        return TensorSource(name, shape, kind, partial(self._read, group, kind))

    def _kind(self, stored: str, name: str, shape: tuple[int, ...]) -> str:
        """The type of a tensor's blocks; empty for the tensor's own."""
        if len(shape) != 2 or "ffn_gate_inp" in name:  # llama.cpp has routers in float32
            return "F32"
        module = stored.removesuffix(".weight")
        options = self.options
        chosen = not options.include or any(fnmatchcase(module, each) for each in options.include)
        chosen = chosen and not any(fnmatchcase(module, each) for each in options.exclude)
        if not chosen or shape[1] % BLOCK:
            self.ignored.append(module)
            return ""
        self.quantized.append(module)
        return "Q8_0" if name in _TABLES else self.kind

    def _read(self, group: Sequence[str], kind: str) -> Iterator[memoryview]:
        """The bytes of a tensor, some rows at a time."""
        for stored in group:
            yield from self._read_part(stored, kind)
        self.progress.advance(1)

    def _read_part(self, stored: str, kind: str) -> Iterator[memoryview]:
        tensor = read_tensor(self.stored[stored])
        if shift := self.layout.shift(stored):
            tensor = tensor.float() + shift
        order = self.layout.rows(stored, tensor.shape[0])
        encode: Callable[[Tensor], Tensor] = ENCODERS.get(kind, partial(_plain, kind=kind))
        step = max(1, _CHUNK // max(1, tensor[0].numel()))
        for first in range(0, tensor.shape[0], step):
            rows = tensor[first : first + step]
            if order is not None:
                rows = tensor[order[first : first + step]]
            yield from _bytes(encode(rows))


def _plain(rows: Tensor, kind: str) -> Tensor:
    return rows.to(_DTYPES[kind])


def _bytes(tensor: Tensor) -> list[memoryview]:
    return [tensor.contiguous().flatten().view(torch.uint8).numpy().data]
