"""Every reader against tensors that the library which owns the format has packed itself.

``data/owners.safetensors`` holds small matrices (the layouts of 32 x 64 or 24 x 128 numbers, two
rows of some without negative ones). Its metadata says for each which library wrote it, the
quantization config that goes with it, and the digest of what that library makes of it again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.unit.quantization.test_formats import read

FILE = Path(__file__).with_name("data") / "owners.safetensors"


def cases() -> dict[str, dict[str, Any]]:
    with safe_open(FILE, framework="pt") as file:
        found: dict[str, dict[str, Any]] = json.loads(file.metadata()["cases"])
        return found


def test_all_libraries_are_represented() -> None:
    libraries = {case["library"].partition(" ")[0] for case in cases().values()}
    assert libraries == {"gptqmodel", "compressed-tensors", "bitsandbytes"}


@pytest.mark.tgi_pain(12)
@pytest.mark.parametrize("name", cases())
def test_weights_equal_those_that_the_library_reads(name: str) -> None:
    case = cases()[name]
    tensors: dict[str, Tensor] = {}
    with safe_open(FILE, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            if key.startswith(f"{name}."):
                tensors[key.removeprefix(f"{name}.")] = file.get_tensor(key)
    weight = read(case["config"], tensors).dequantize(torch.float32) + 0.0  # no -0
    digest = hashlib.blake2b(weight.contiguous().numpy().tobytes(), digest_size=16).hexdigest()
    assert digest == case["digest"]
