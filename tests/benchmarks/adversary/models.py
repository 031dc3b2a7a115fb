"""Miniatures of all families, of GGUF's architectures and of models with images.

Their fields are those of their files, and the keys that the code asks for when it reads them, so
that new families and keys are covered without changes here. A field that several models have is
varied in the first of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.benchmarks.adversary.checkpoints import Case, field_paths, field_writer
from tests.benchmarks.adversary.gguf_headers import headers
from tgi_cli.gguf.model_config import model_config
from tgi_cli.gguf.reader import GGUFFile, Value, read_gguf
from tgi_cli.gguf.tokenizer import read_tokenizer
from tgi_cli.gguf.writer import TensorSource, write_gguf
from tgi_cli.models.config import ModelConfig, read_config
from tgi_cli.models.registry import model_facts

if TYPE_CHECKING:
    from tests.parity.cases import Case as ParityCase

VALUES: dict[str, Callable[[], str]] = {
    **{
        text: partial(str, text)
        for text in ("0", "-1", "1.5", "1000000000000", "1e308", "NaN", "null", "[]", "true", '"a"')
    },
    "nested objects": lambda: '{"a":[1]}',
    "a million numbers": lambda: "[" + "1," * 999_999 + "1]",
}
"""JSON texts by kind."""

METADATA: dict[str, Callable[[], Value]] = {
    **{repr(value): partial(lambda value: value, value)
       for value in (0, -1, 1.5, True, 10**12, (1 << 31) - 1, 1 << 63, -1e30, math.nan, math.inf,
                     "", "a", [], [0], [-1], ["a"], [0.5], [True])},
    "a million numbers": lambda: [1] * 1_000_000,
    "a million texts": lambda: ["a"] * 1_000_000,
    "a text of 5 MB": lambda: "a" * 5_000_000,
    "a text of 5 MB in a list": lambda: ["a" * 5_000_000],
}  # fmt: skip
"""Values of a GGUF file's keys by kind."""

GGUF = "model.gguf"


@dataclass(frozen=True)
class Subject:
    """A miniature, and what is done with its variants.

    Attributes:
        part: of the benchmark.
        name: of the model.
        make: writes it into a folder, which is not there yet.
        load: what a server does with it, in a process of its own. Raises TgiError.
        cases: the variants of the one in a folder.
    """

    part: str
    name: str
    make: Callable[[Path], object]
    load: Callable[[Path], object]
    cases: Callable[[Path], Iterator[Case]]


def subjects(parts: list[str]) -> Iterator[Subject]:
    """Yield the miniatures of the parts that are named."""
    known: set[tuple[Any, ...]] = set()
    if "families" in parts:
        from tests.parity.cases import CASES
        from tests.tools.miniatures import make_miniature

        for name, case in CASES.items():
            make = partial(make_miniature, case)
            yield Subject("families", name, make, generate, partial(_config_cases, known))
    if "gguf" in parts:
        from tests.parity.cases import CASES
        from tests.parity.test_gguf import FAMILIES
        from tests.parity.test_gguf_transformers import CASES as OTHERS
        from tests.tools.gguf_models import demo_metadata, spm_metadata

        tokenizers = (("byte-level BPE", demo_metadata), ("SentencePiece", spm_metadata))
        for name, metadata in tokenizers:
            make_vocabulary = partial(_vocabulary, metadata())
            yield Subject("gguf", name, make_vocabulary, generate, partial(_gguf_cases, known))
        for name, case in ({name: CASES[name] for name in FAMILIES} | OTHERS).items():
            make_gguf = partial(_gguf_family, case)
            yield Subject("gguf", name, make_gguf, generate, partial(_gguf_cases, known))
    if "images" in parts:
        from tests.tools.image_models import IMAGE_MODELS, write_image_model

        for name in IMAGE_MODELS:
            make_image = partial(write_image_model, name)
            yield Subject("images", name, make_image, preprocess, partial(_config_cases, known))


def generate(folder: Path) -> str:
    """Load a model and continue a prompt of three tokens."""
    from tgi_cli.llm.llm import LLM
    from tgi_cli.llm.outputs import GenerationError

    file = folder / GGUF
    with LLM(file if file.exists() else folder, max_batch_total_tokens=1024) as model:
        try:
            return str(model.generate([[5, 6, 7]], max_new_tokens=2))
        except (GenerationError, ValueError) as error:
            return f"refused: {error}"


def preprocess(folder: Path) -> str:
    """Make the image processor of a model, and preprocess two images."""
    from PIL import Image

    from tgi_cli.text.tokenizer import Tokenizer
    from tgi_cli.vision.images import ImageError, ImageOptions
    from tgi_cli.vision.model_formats import image_format
    from tgi_cli.vision.processing import image_processor

    processor = image_processor(folder, image_format(folder, Tokenizer.load(folder)), 64)
    found = [str(processor.largest_image())]
    for size in ((90, 60), (3, 200)):
        try:
            image = processor.process(Image.new("RGB", size), ImageOptions(), bytes(32))
            found.append(str(image.num_rows))
        except ImageError as error:
            found.append(f"refused: {error}")
        except (MemoryError, TypeError, AttributeError) as error:
            # The process that preprocesses reports them as such: see vision/image_process.py.
            found.append(f"failed: {error}")
    return " ".join(found)


# ------------------------------------------------------------------ JSON files


def _config_cases(known: set[tuple[Any, ...]], folder: Path) -> Iterator[Case]:
    """Vary the fields of the JSON files that no model before has had."""
    for name in ("config.json", "preprocessor_config.json", "processor_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        value = json.loads(file.read_text(encoding="utf-8"))
        paths = list(field_paths(value))
        if name == "config.json":
            paths += [(key,) for key in _asked_for(folder) if key not in value]
        for path in paths:
            if (name, *path) in known:
                continue
            known.add((name, *path))
            for kind, make in VALUES.items():
                write = field_writer(name, value, path, make)
                yield Case(name, ".".join(map(str, path)), kind, write)


def _asked_for(folder: Path) -> list[str]:
    """The keys of config.json that are asked for before weights are loaded."""
    asked: dict[str, None] = {}
    get = ModelConfig.get

    def recorded(self: ModelConfig, key: str, *arguments: Any) -> Any:
        asked[key] = None
        return get(self, key, *arguments)

    with mock.patch.object(ModelConfig, "get", recorded):
        try:
            model_facts(read_config(folder))
        except Exception:  # a part of a model, as those of images are
            return []
    return list(asked)


# ------------------------------------------------------------------ GGUF


class _Asked(dict[str, Any]):
    """Metadata that note which keys are asked for."""

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self.asked: dict[str, None] = {}

    def get(self, key: str, default: Any = None) -> Any:
        self.asked[key] = None
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked[str(key)] = None
        return super().__contains__(key)


def _vocabulary(metadata: Mapping[str, Value], folder: Path) -> None:
    from tests.tools.gguf_models import llama_gguf

    folder.mkdir()
    llama_gguf(folder / GGUF, metadata)


def _gguf_family(case: ParityCase, folder: Path) -> None:
    from tests.tools.gguf_files import write_gguf as write_miniature
    from tests.tools.miniatures import make_miniature, write_byte_tokenizer

    plain = folder.with_name(f"{folder.name}-plain")
    write_miniature(make_miniature(case, plain), folder)
    (folder / "config.json").unlink()  # it is made of the file
    write_byte_tokenizer(folder)


def _gguf_cases(known: set[tuple[Any, ...]], folder: Path) -> Iterator[Case]:
    """Vary the keys that no file before has had, then the tensors and the bytes of the header."""
    file = read_gguf(folder / GGUF)
    metadata = _Asked(file.metadata)
    watched = replace(file, metadata=metadata)
    model_config(watched)
    if "tokenizer.ggml.model" in file.metadata:
        read_tokenizer(watched)
    for key in dict.fromkeys((*file.metadata, *metadata.asked)):
        general = key.removeprefix(f"{file.architecture}.")
        if (GGUF, general) in known:
            continue
        known.add((GGUF, general))
        for kind, make in METADATA.items():
            yield Case(GGUF, key, kind, partial(_rewrite, file, key, make))
    if (GGUF, "(tensors)") not in known:
        known.add((GGUF, "(tensors)"))
        for kind, change in _TENSORS.items():
            yield Case(GGUF, "(tensors)", kind, partial(_rewrite_tensors, file, change))
        for kind, content in headers(file):
            yield Case(GGUF, "(header)", kind, partial(_replace, content))


Tensors = list[TensorSource]


def _first_named(tensors: Tensors, name: str) -> Tensors:
    return [replace(tensors[0], name=name), *tensors[1:]]


def _first_shaped(tensors: Tensors, *shape: int) -> Tensors:
    """The first tensor with another shape, and zeros that fill it."""
    first = replace(tensors[0], shape=shape, type="F32")
    return [replace(first, read=lambda: [bytes(first.size)]), *tensors[1:]]


_TENSORS: dict[str, Callable[[Tensors], Tensors]] = {
    "none": lambda tensors: [],
    "the first left out": lambda tensors: tensors[1:],
    "a layer of 5,000 digits": lambda tensors: _first_named(tensors, f"blk.{'1' * 5000}.a.weight"),
    "a name of 60 KB": lambda tensors: _first_named(tensors, "a" * 60_000),
    "a scalar": lambda tensors: _first_shaped(tensors),
    "a vector": lambda tensors: _first_shaped(tensors, 64),
    "four dimensions": lambda tensors: _first_shaped(tensors, 4, 4, 4, 4),
    "a million rows of one": lambda tensors: _first_shaped(tensors, 1_000_000, 1),
    "100,000 more": lambda tensors: [
        *tensors,
        *(TensorSource(f"more.{n}", (1,), "F32", lambda: [bytes(4)]) for n in range(100_000)),
    ],
    "300,000 experts of one number": lambda tensors: [
        *tensors,
        TensorSource(
            "blk.0.ffn_up_exps.weight", (300_000, 1, 1), "F32", lambda: [bytes(1_200_000)]
        ),
    ],
}
"""What may be wrong with tensors, by kind."""


def _rewrite(file: GGUFFile, key: str, make: Callable[[], Value], folder: Path) -> None:
    """Write the file into ``folder`` with another value of a key."""
    _write(folder / GGUF, {**file.metadata, key: make()}, _tensors(file))


def _rewrite_tensors(file: GGUFFile, change: Callable[[Tensors], Tensors], folder: Path) -> None:
    _write(folder / GGUF, file.metadata, change(_tensors(file)))


def _replace(content: Callable[[], bytes], folder: Path) -> None:
    (folder / GGUF).unlink(missing_ok=True)
    (folder / GGUF).write_bytes(content())


def _write(path: Path, metadata: Mapping[str, Value], tensors: Tensors) -> None:
    path.unlink(missing_ok=True)  # it may be a link to the miniature's file
    write_gguf(path, metadata, tensors)


def _tensors(file: GGUFFile) -> Tensors:
    data = file.path.read_bytes()
    return [
        TensorSource(
            tensor.name,
            tensor.shape,
            tensor.type.name,
            partial(lambda part: [part], data[tensor.start : tensor.start + tensor.size]),
        )
        for tensor in file.tensors.values()
    ]
