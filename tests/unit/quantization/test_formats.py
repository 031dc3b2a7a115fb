"""Every format's reader, against a writer that was made from the layout's description alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools import quantized
from tests.tools.quantized import Layout
from tgi_cli.errors import CheckpointError, ModelError, UnsupportedModelError
from tgi_cli.models.stored_tensor import StoredTensor
from tgi_cli.quantization.bitsandbytes import TABLES
from tgi_cli.quantization.detect import detect_format
from tgi_cli.quantization.quantized_weight import QuantizedWeight

SAFETENSORS = {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}

LAYOUTS: dict[str, Layout] = {
    **{
        f"gptq {bits} bits, groups of {size}": quantized.gptq(bits, size)
        for bits in (2, 3, 4, 8)
        for size in (32, -1)
    },
    **{
        f"gptq {bits} bits with zeros": quantized.gptq(bits, 32, sym=False) for bits in (2, 3, 4, 8)
    },
    "gptq, version 2": quantized.gptq(4, 32, sym=False, v2=True),
    "gptq 3 bits, version 2": quantized.gptq(3, 32, sym=False, v2=True),
    "gptq, activation order": quantized.gptq(4, 32, sym=False, desc_act=True),
    "gptq without g_idx": quantized.gptq(4, 32, indexed=False),
    "gptq, a short last group": quantized.gptq(4, 128, indexed=False),
    "awq": quantized.awq(32),
    **{f"pack-quantized {bits} bits": quantized.pack_quantized(bits, 32) for bits in (2, 3, 4, 8)},
    "pack-quantized 3 bits, older": quantized.pack_quantized(3, 32, sym=False, whole=True),
    "pack-quantized with zeros": quantized.pack_quantized(4, 32, sym=False),
    "pack-quantized 8 bits with zeros": quantized.pack_quantized(8, 32, sym=False),
    "pack-quantized per row": quantized.pack_quantized(4, 0),
    "pack-quantized, activation order": quantized.pack_quantized(4, 32, sym=False, actorder=True),
    "int-quantized": quantized.int_quantized(),
    **{f"float-quantized by {s}": quantized.float_quantized(s) for s in ("channel", "tensor")},
    "float-quantized by block": quantized.float_quantized("block"),
    **{f"fp8 by {s}": quantized.fp8(s) for s in ("channel", "tensor", "block")},
    "fp8, inverse scales": quantized.fp8("channel", inverse=True),
    "nvfp4 of modelopt": quantized.nvfp4("modelopt"),
    "nvfp4 of compressed-tensors": quantized.nvfp4("compressed-tensors"),
    "bitsandbytes": quantized.bitsandbytes_8bit(),
    **{
        f"bitsandbytes {kind}{', nested' * nested}": quantized.bitsandbytes_4bit(
            kind, nested=nested
        )
        for kind in ("nf4", "fp4")
        for nested in (False, True)
    },
}


def random_weight(outputs: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.empty(outputs, inputs).normal_(generator=generator)
    weight[3] = weight[3].abs()  # whose zeros are 0
    return weight


def read(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], module: str = "a.b"
) -> QuantizedWeight:
    """The weight of a module as our readers see it."""
    layout = detect_format(config)
    stored = {
        f"{module}.{suffix}": StoredTensor(suffix, None, tuple(each.shape), SAFETENSORS[each.dtype])  # type: ignore[arg-type]
        for suffix, each in tensors.items()
    }
    assert list(layout.plain_names(stored)) == [f"{module}.weight"]
    (found,) = layout.modules(stored).items()
    merged = layout.merge(*found, lambda suffix: tensors[suffix])
    weight = merged.read(*(tensors[suffix] for suffix in merged.names))
    assert weight.shape == merged.shape
    return weight


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(64, 192), (32, 160)])
def test_weights_equal_those_that_were_written(name: str, shape: tuple[int, int]) -> None:
    layout = LAYOUTS[name]
    tensors, stands_for = layout.write("a.b", random_weight(*shape))
    weight = read(layout.config, tensors)
    assert torch.equal(weight.dequantize(torch.float32), stands_for)


@pytest.mark.parametrize("name", LAYOUTS)
def test_formats_say_whether_codes_are_integers(name: str) -> None:
    """Of activations a scheme may say what it likes."""
    integers = name.startswith(("gptq", "awq", "pack-", "int-")) or name == "bitsandbytes"
    config = LAYOUTS[name].config
    assert detect_format(config).has_integers == integers
    if "config_groups" in config:
        groups = {
            key: group | {"input_activations": {"num_bits": 8, "type": "int"}}
            for key, group in config["config_groups"].items()
        }
        assert detect_format(config | {"config_groups": groups}).has_integers == integers


def test_one_group_of_integers_is_enough() -> None:
    wide, narrow = (
        layout.config["config_groups"]["group_0"]
        for layout in (quantized.float_quantized("channel"), quantized.pack_quantized(4, 32))
    )
    config = quantized.float_quantized("channel").config
    for groups, expected in (
        ({"a": wide, "b": narrow}, True),
        ({"a": wide, "b": narrow | {"weights": None}}, False),
    ):
        assert detect_format(config | {"config_groups": groups}).has_integers is expected


def test_bitsandbytes_tables_equal_the_librarys() -> None:
    for kind, table in TABLES.items():
        tensors, _ = quantized.bitsandbytes_4bit(kind).write("a.b", torch.ones(2, 64))
        torch.testing.assert_close(torch.tensor(table), tensors["weight.quant_map"])


def test_compressed_tensors_schemes_apply_to_their_targets() -> None:
    four, eight = (
        quantized.pack_quantized(4, 32),
        quantized.pack_quantized(8, 32),
    )
    config = four.config | {
        "config_groups": {
            "group_0": four.config["config_groups"]["group_0"],
            "group_1": eight.config["config_groups"]["group_0"] | {"targets": ["re:.*down_proj$"]},
        }
    }
    for module, layout in (("mlp.up_proj", four), ("mlp.down_proj", eight)):
        tensors, stands_for = layout.write(module, random_weight(32, 64))
        weight = read(config, tensors, module)
        assert torch.equal(weight.dequantize(torch.float32), stands_for)


def test_modules_of_several_widths_in_one_checkpoint() -> None:
    config = quantized.gptq(4, 32).config
    tensors, stands_for = quantized.gptq(8, 64).write("a.b", random_weight(32, 128))
    assert torch.equal(read(config, tensors).dequantize(torch.float32), stands_for)
    del tensors["g_idx"]
    assert torch.equal(read(config, tensors).dequantize(torch.float32), stands_for)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "exl2"}, "exl2 .*: exl2 mixes widths"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin .*: weights in Marlin"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "marlin"),
        ({"quant_method": "aqlm"}, "quantized with aqlm are not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout 'gemv'"),
        ({}, "an unnamed method"),
    ],
)
def test_unsupported_formats_are_refused_with_a_reason(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        detect_format(config)


def test_an_invalid_config_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="is invalid"):
        detect_format({"quant_method": "gptq", "group_size": "many"})
    with pytest.raises(ModelError, match="is invalid"):
        detect_format({"quant_method": "compressed-tensors"})


@pytest.mark.parametrize("name", ["gptq 4 bits, groups of 32", "awq", "pack-quantized 4 bits"])
def test_contradictory_tensors_are_reported(name: str) -> None:
    layout = LAYOUTS[name]
    tensors, _ = layout.write("a.b", random_weight(64, 192))
    scales = "scales" if "scales" in tensors else "weight_scale"
    tensors[scales] = tensors[scales][:-1]
    with pytest.raises(CheckpointError, match=r"a\.b is not a valid"):
        read(layout.config, tensors)
