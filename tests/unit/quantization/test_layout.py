"""What is written is what is read again, to the last bit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tools import quantized
from tests.unit.quantization.test_algorithms_gptq import correlated, random_weight, seen
from tests.unit.quantization.test_formats import read
from tgi_cli.errors import ConfigError
from tgi_cli.quantization import bits
from tgi_cli.quantization.algorithms import grid
from tgi_cli.quantization.algorithms.gptq import gptq
from tgi_cli.quantization.algorithms.grid import rtn
from tgi_cli.quantization.algorithms.layout import pack, quantization_config, quantize_config
from tgi_cli.quantization.algorithms.recipe import (
    QuantizationResult,
    Recipe,
    check_recipe,
    default_format,
    describe_recipe,
    incompatibility,
)


@settings(deadline=None, max_examples=40)
@given(
    width=st.sampled_from((2, 3, 4, 8)),
    rows=st.integers(1, 9),
    words=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_packing_is_reversible(width: int, rows: int, words: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2**width, (rows, 32 * words), generator=generator).to(torch.uint8)
    packed = bits.pack(numbers, width)
    assert packed.dtype == torch.int32
    assert packed.shape == (rows, words * width)
    assert torch.equal(bits.unpack(packed, width), numbers)
    assert packed.numpy().tobytes() == quantized.packed(numbers.numpy(), width).tobytes()


GPTQ = Recipe(method="gptq", group_size=32, group_aware=False)
COMPRESSED = replace(GPTQ, format="compressed-tensors")
BYTES = Recipe(method="fp8", bits=8, group_size=-1, format="compressed-tensors")

RECIPES = [
    *(
        replace(GPTQ, bits=width, sym=sym, group_size=size, format=layout)
        for width in (2, 3, 4, 8)
        for sym in (True, False)
        for size in (32, -1)
        for layout in ("gptq", "gptq_v2")
    ),
    replace(GPTQ, desc_act=True, sym=False),
    replace(GPTQ, desc_act=True, static_groups=True),
    replace(GPTQ, group_aware=True, bits=3),
    replace(GPTQ, group_size=80),
    replace(GPTQ, format="awq"),
    replace(GPTQ, format="awq", sym=False),
    replace(GPTQ, format="awq", desc_act=True, static_groups=True, group_size=64),
    replace(GPTQ, method="awq", group_aware=True, format="awq", sym=False, group_size=-1),
    *(
        replace(COMPRESSED, bits=width, sym=sym, group_size=size, scale_dtype=dtype)
        for width in (2, 4, 8)
        for sym in (True, False)
        for size, dtype in ((32, torch.bfloat16), (-1, torch.float32))
    ),
    replace(COMPRESSED, desc_act=True, static_groups=True),
    replace(COMPRESSED, method="rtn", group_size=64, scale_dtype=torch.float16),
    *(
        replace(BYTES, method=method, scale_dtype=dtype)
        for method in ("fp8", "int8")
        for dtype in (torch.bfloat16, torch.float32)
    ),
    replace(BYTES, group_size=0, scale_dtype=torch.bfloat16),
]


def made(recipe: Recipe, rows: int = 64, inputs: int = 192) -> QuantizationResult:
    weight = random_weight(rows, inputs)
    weight[5] = weight[5].abs()  # whose zeros are the least
    if recipe.method == "gptq":
        return gptq(weight, seen(correlated(400, inputs)), recipe)
    return rtn(weight, recipe)


@pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda r: f"{r.format}: {describe_recipe(r)} {r.bits}"
)
def test_written_weights_are_read_back(recipe: Recipe) -> None:
    check_recipe(recipe)
    assert incompatibility(recipe, 64, 192) is None
    result = made(recipe)
    tensors = pack(result, recipe)
    assert all(each.is_contiguous() for each in tensors.values())
    config = json.loads(json.dumps(quantization_config(recipe, ["lm_head", "model.a.gate"])))
    weight = read(config, tensors)
    assert torch.equal(weight.dequantize(torch.float32), grid.dequantize(result))
    for file in quantize_config(recipe, ["lm_head"]).values():
        again = read(json.loads(json.dumps(file)), tensors)
        assert torch.equal(again.dequantize(torch.float32), grid.dequantize(result))


def test_packed_weights_need_no_whole_words_along_outputs() -> None:
    recipe = replace(COMPRESSED, sym=False)
    assert incompatibility(recipe, 30, 96) is None
    result = made(recipe, 30, 96)
    weight = read(quantization_config(recipe, []), pack(result, recipe))
    assert torch.equal(weight.dequantize(torch.float32), grid.dequantize(result))


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}


def test_tensors_have_the_names_of_the_format() -> None:
    int32 = torch.int32
    assert shapes(pack(made(GPTQ), GPTQ)) == {
        "qweight": (int32, (24, 64)),
        "qzeros": (int32, (6, 8)),
        "scales": (torch.float16, (6, 64)),
        "g_idx": (int32, (192,)),
    }
    assert set(pack(made(GPTQ), GPTQ)["qzeros"].flatten().tolist()) == {0x77777777}
    eight = replace(GPTQ, bits=8)
    assert set(pack(made(eight), eight)["qzeros"].flatten().tolist()) == {0x7F7F7F7F}
    awq = replace(GPTQ, format="awq")
    assert shapes(pack(made(awq), awq)) == {
        "qweight": (int32, (192, 8)),
        "qzeros": (int32, (6, 8)),
        "scales": (torch.float16, (6, 64)),
    }
    packed = replace(COMPRESSED, sym=False, scale_dtype=torch.bfloat16)
    assert shapes(pack(made(packed), packed)) == {
        "weight_packed": (int32, (64, 24)),
        "weight_scale": (torch.bfloat16, (64, 6)),
        "weight_shape": (torch.int64, (2,)),
        "weight_zero_point": (int32, (8, 6)),
    }
    single = replace(BYTES, group_size=0)
    assert shapes(pack(made(single), single)) == {
        "weight": (torch.float8_e4m3fn, (64, 192)),
        "weight_scale": (torch.float16, (1,)),
    }
    rows = replace(BYTES, method="int8")
    assert shapes(pack(made(rows), rows)) == {
        "weight": (torch.int8, (64, 192)),
        "weight_scale": (torch.float16, (64, 1)),
    }


def test_configs_describe_the_recipe() -> None:
    config = quantization_config(
        replace(GPTQ, desc_act=True, format="gptq_v2", sym=False), ["lm_head", "model.0.mlp.gate"]
    )
    assert config["checkpoint_format"] == "gptq_v2"
    assert (config["bits"], config["group_size"]) == (4, 32)
    assert (config["sym"], config["desc_act"]) == (False, True)
    assert config["dynamic"] == {r"-:^model\.0\.mlp\.gate$": {}}
    # In memory inputs are where they were: nothing has to be gathered.
    static = quantization_config(replace(GPTQ, desc_act=True, static_groups=True), [])
    assert not static["desc_act"]
    assert static["dynamic"] is None
    awq = quantization_config(replace(GPTQ, format="awq"), ["lm_head"])
    assert awq["modules_to_not_convert"] == ["lm_head"]
    files = quantize_config(replace(GPTQ, format="awq"), ["lm_head"])
    assert files["quant_config.json"]["w_bit"] == 4

    def scheme(recipe: Recipe, of: str = "weights") -> dict[str, Any]:
        found: dict[str, Any] = quantization_config(recipe, [])["config_groups"]["group_0"][of]
        return found

    assert scheme(COMPRESSED)["actorder"] is None
    assert scheme(replace(COMPRESSED, desc_act=True, static_groups=True))["actorder"] == "weight"
    assert scheme(COMPRESSED)["strategy"] == "group"
    assert scheme(replace(COMPRESSED, group_size=-1))["strategy"] == "channel"
    assert scheme(BYTES)["type"] == "float"
    assert scheme(BYTES, "input_activations")["dynamic"]
    assert scheme(replace(BYTES, group_size=0))["strategy"] == "tensor"
    assert quantize_config(BYTES, []) == {}


WRONG = [
    (replace(GPTQ, method="nothing"), "--method nothing is unknown"),
    (replace(GPTQ, format="nothing"), "--format nothing is unknown"),
    (replace(GPTQ, bits=5), "--bits 5 is unknown"),
    (replace(GPTQ, percdamp=0.0), "not between 0 and 1"),
    (replace(GPTQ, group_size=0), "neither -1 nor a multiple of 8"),
    (replace(GPTQ, group_size=33), "neither -1 nor a multiple of 8"),
    (replace(GPTQ, desc_act=True, group_aware=True), "not both"),
    (replace(GPTQ, format="awq", bits=3), "awq's layout has 4 bits"),
    (replace(GPTQ, format="awq", desc_act=True), "does not store the groups"),
    (replace(GPTQ, format="gptq", scale_dtype=torch.bfloat16), "scales in float16"),
    (replace(COMPRESSED, bits=3), "3 bits are packed"),
    (replace(COMPRESSED, desc_act=True), "compressed-tensors does not store the groups"),
    (replace(GPTQ, method="rtn", desc_act=True), "--act-order is for gptq, not rtn"),
    (replace(GPTQ, method="awq", static_groups=True), "--static-groups is for gptq, not awq"),
    (replace(GPTQ, method="awq", mse=True), "searches what to clip"),
    (replace(BYTES, format="gptq"), "fp8 weights cannot be written in the format gptq"),
    (replace(BYTES, method="int8", group_size=0), "a scale per row"),
    (replace(BYTES, bits=4), "fp8 has 8 bits, not 4"),
    (replace(BYTES, sym=False), "no zeros"),
    (replace(BYTES, mse=True), "no scales to search"),
    (replace(BYTES, desc_act=True), "is for gptq, not fp8"),
]


@pytest.mark.parametrize(("recipe", "words"), WRONG, ids=[words for _, words in WRONG])
def test_invalid_recipes_are_refused_with_a_remedy(recipe: Recipe, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_recipe(recipe)
    assert words in raised.value.cause


@pytest.mark.parametrize(
    ("recipe", "shape", "why"),
    [
        (GPTQ, (64, 100), "100 inputs are not a multiple of 8"),
        (replace(GPTQ, bits=3), (64, 80), "80 inputs are not a multiple of 32"),
        (replace(GPTQ, bits=2), (24, 64), "24 outputs are not a multiple of 16"),
        (replace(GPTQ, format="awq"), (60, 64), "60 outputs are not a multiple of 8"),
        (replace(GPTQ, format="awq"), (64, 80), "80 inputs are not a multiple of groups of 32"),
        (COMPRESSED, (64, 80), "80 inputs are not a multiple of groups of 32"),
    ],
)
def test_incompatible_shapes_are_reported(recipe: Recipe, shape: tuple[int, int], why: str) -> None:
    found = incompatibility(recipe, *shape)
    assert found is not None
    assert why in found
    assert incompatibility(BYTES, *shape) is None


def test_recipes_are_described_in_words() -> None:
    assert describe_recipe(replace(GPTQ, desc_act=True)) == (
        "gptq, 4 bits, groups of 32, symmetric, act-order"
    )
    assert describe_recipe(replace(GPTQ, method="rtn", sym=False, group_size=-1, mse=True)) == (
        "rtn, 4 bits, one scale a row, with zeros, scales by least squares"
    )
    assert describe_recipe(BYTES) == "fp8, one scale a row"
    assert [default_format(each) for each in ("gptq", "awq", "rtn", "fp8", "int8")] == [
        *("gptq", "awq", "gptq"),
        *("compressed-tensors", "compressed-tensors"),
    ]
    assert default_format("gptq", sym=False) == "gptq_v2"


def test_gptq_configs_name_quantized_modules_if_some_are_not() -> None:
    modules = [
        f"model.layers.{block}.{name}"
        for block in range(12)
        for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.experts.0.up_proj")
        if (block, name) != (1, "self_attn.q_proj")
    ]
    routers = [f"model.layers.{block}.mlp.gate" for block in range(12)]
    plain = ["lm_head", *routers, "model.layers.1.self_attn.q_proj"]
    named = "modules_in_block_to_quantize"
    assert named not in quantization_config(GPTQ, ["lm_head"], modules)
    (names,) = quantization_config(GPTQ, plain, modules)[named]
    assert names[:2] == ["mlp.gate_proj", "mlp.experts.0.up_proj"]
    assert names[2:] == [name for name in modules if name.endswith("q_proj")]
    # transformers asks for the ends of names, vLLM for their parts.
    assert all(name.endswith(tuple(names)) for name in modules)
    assert not any(part in name for part in names for name in plain)
    files = quantize_config(GPTQ, plain, modules)
    assert files["quantize_config.json"][named] == [names]
