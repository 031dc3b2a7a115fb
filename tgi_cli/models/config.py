"""A checkpoint's configuration: config.json and generation_config.json, read as JSON.

transformers' classes are not used, since importing them takes 100 MB and seconds.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from tgi_cli.errors import CheckpointError, ModelError
from tgi_cli.files import read_json
from tgi_cli.gguf.model_config import METHOD as GGUF
from tgi_cli.models.weight_files import file_header

log = logging.getLogger(__name__)

T = TypeVar("T")

_LARGEST = 1 << 63
"""Limit of whole numbers of config.json, as of torch's."""

_MOST_ENDS = 1024
"""Limit of ids that end a text; published models have up to a dozen."""

_SHOWN = 60
"""Limit of a value's characters in an error message."""

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""dtypes by their names in safetensors."""

TEXT_ALONE = "images and sound are not taken: only the text part of the model is loaded"
"""Logged for a model that takes more than text."""

_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files with the quantization config of older checkpoints, and the method if they name none."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of the checkpoint in folder ``path``, unchanged."""

    path: Path
    architecture: str
    raw: dict[str, Any]
    """config.json."""
    generation: dict[str, Any] = field(default_factory=dict)
    """generation_config.json; empty if there is none."""
    trust_remote_code: bool = False
    """Whether code that comes with the checkpoint may run. It does only if neither this package
    nor transformers knows the architecture."""

    @property
    def file(self) -> Path:
        """Its config.json."""
        return self.path / "config.json"

    def invalid(self, problem: str) -> ModelError:
        """The error of an invalid config.json."""
        return ModelError(f"{self.file}: {problem}")

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of ``key``, which must be a ``kind``; ``default`` if it is null or absent.

        Raises:
            ModelError: it is of another type, or absent without a default.
        """
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.file} does not say {key!r}")
            return default
        if kind is float and type(value) is int and abs(value) < _LARGEST:
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.invalid(f"{key!r} is {shown(value)}, not {kind.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.invalid(f"{key!r} is {value}, not a number")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """The value of ``key``, an integer above 0 and below 2**63. Raises like ``get``."""
        value = self.get(key, int, default)
        if not 0 < value < _LARGEST:
            raise self.invalid(
                f"{key!r} is {shown(value)}, must be positive"
                + (" and below 2**63" if value > 0 else "")
            )
        return value

    def eos_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        """The ids that end a text, from the generation config or else the model's; may be empty.

        Ids outside the vocabulary are left out, with a warning: a model never generates them.

        Raises:
            ModelError: they are no whole numbers, or more than 1,024.
        """
        text = self.raw.get("text_config")
        for source, name in (
            (self.generation, "generation_config.json"),
            (self.raw, "config.json"),
            (text if isinstance(text, dict) else {}, "config.json"),
        ):
            stated = source.get("eos_token_id")
            if stated is None:
                continue
            ids = stated if isinstance(stated, list) else [stated]
            if len(ids) > _MOST_ENDS or not all(type(each) is int for each in ids):
                raise ModelError(
                    f"{self.path / name}: 'eos_token_id' is {shown(stated)}, not an id or a few",
                    "download the model again, or correct the file",
                )
            found = tuple(dict.fromkeys(each for each in ids if 0 <= each < vocab_size))
            if len(found) < len(set(ids)):
                other = next(each for each in ids if each not in found)
                log.warning(
                    "%s: 'eos_token_id' %s is no token of the vocabulary (%d), and is left out",
                    self.path / name,
                    shown(other),
                    vocab_size,
                )
            return found
        return ()

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The checkpoint's quantization config, or None if it has none.

        It is part of config.json; older checkpoints have a separate file.

        Raises:
            ModelError: it is no JSON object.
        """
        for key in ("quantization_config", "compression_config"):
            stated = self.raw.get(key)
            if stated is not None:
                return self.get(key, dict)
        for name, method in _QUANTIZATION_FILES.items():
            if (self.path / name).is_file():
                return {"quant_method": method} | _read_object(self.path / name)
        return None

    @property
    def is_gguf(self) -> bool:
        """Whether config.json was made from the keys of a GGUF file."""
        return self.get("quantization_config", dict, {}).get("quant_method") == GGUF

    @property
    def dtype(self) -> str:
        """The dtype of the weights on disk: ``float32``, ``bfloat16`` or ``float16``.

        Raises:
            CheckpointError: neither config.json nor any weights name it.
        """
        stated = self.raw.get("dtype", self.raw.get("torch_dtype"))
        if isinstance(stated, str) and stated in _DTYPES.values():
            return stated
        return self._dtype_on_disk()

    def _dtype_on_disk(self) -> str:
        for file in sorted(self.path.glob("*.safetensors")):
            if file.is_file():  # reading a pipe would block
                for entry in file_header(file).values():
                    if entry.dtype in _DTYPES:
                        return _DTYPES[entry.dtype]
        raise CheckpointError(f"{self.path} has no safetensors file with floating-point weights")


def read_config(path: Path, trust_remote_code: bool = False) -> ModelConfig:
    """Read the configuration of the checkpoint in folder ``path``.

    Raises:
        ModelError: no folder, no config.json, or one that is not a JSON object.
    """
    file = path / "config.json"
    if not path.is_dir():
        raise ModelError(f"{path} is not a folder", "give a model id or a folder with config.json")
    if not file.is_file():
        raise ModelError(
            f"{path} has no config.json", "give a folder that holds a model in Hugging Face form"
        )
    raw = _read_object(file)
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not isinstance(next(iter(architectures), None), str):
        raise ModelError(f"{file} names no architecture")
    generation_file = path / "generation_config.json"
    generation = _read_object(generation_file) if generation_file.is_file() else {}
    return ModelConfig(path, architectures[0], raw, generation, trust_remote_code)


def text_part(config: ModelConfig, tied: bool = False) -> ModelConfig:
    """The configuration of the decoder of a model that takes more than text.

    transformers keeps it as ``text_config``; whether embeddings are tied is stated beside it.

    Args:
        config: configuration of the whole model.
        tied: whether embeddings are tied if config.json does not state it.

    Raises:
        ModelError: ``text_config`` is no JSON object.
    """
    inner = config.get("text_config", dict, {})
    stated = {"tie_word_embeddings": config.get("tie_word_embeddings", bool, tied)}
    return replace(config, raw=inner | stated)


@dataclass(frozen=True, slots=True)
class TextModelPart:
    """The decoder of a model that may take more than text.

    Attributes:
        config: configuration of the decoder.
        prefix: prefix of its tensors' names in the checkpoint.
        notice: a warning about what is left out, for the log.
    """

    config: ModelConfig
    prefix: str
    notice: str

    @classmethod
    def of(cls, config: ModelConfig, alone: str, tied: bool = False) -> TextModelPart:
        """The text model of a checkpoint of ``alone``, or of one that has it as a part.

        Raises:
            ModelError: as :func:`text_part`.
        """
        if config.architecture == alone:
            return cls(config, "model", "")
        return cls(text_part(config, tied), "model.language_model", TEXT_ALONE)


def shown(value: object) -> str:
    """A value for an error message, shortened if it is long."""
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else _outline(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def shown_error(error: Exception) -> str:
    """An error's class and message for another error message, shortened if they are long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 200 else text[:200] + '...'}"


def _outline(value: object) -> str:
    size = len(value) if isinstance(value, (list, dict)) else 0
    small = repr(value) if size <= _SHOWN else ""
    return small if small and len(small) <= _SHOWN else f"a {type(value).__name__} of {size}"


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = read_json(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", "download the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object", "download the model again")
    return value
