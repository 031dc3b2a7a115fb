"""Whether the libraries that own the formats read what we write; run when a writer changes.

    python -m tests.tools.reference_libraries write FILE
    ENVIRONMENT/bin/python tests/tools/reference_libraries.py read FILE \\
        tests/unit/quantization/data/written.json

The first writes small weights in every layout, and what they stand for. The second runs where
gptqmodel or compressed-tensors are installed (which need not have our dependencies), has them read
the layouts that are theirs, and notes a digest of the tensors of each that came out right, to the
last bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SHAPE = (64, 192)
EXPECTED = "expected"


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of names, shapes and bytes."""
    state = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def cases() -> Iterator[tuple[str, dict[str, Any], dict[str, torch.Tensor], torch.Tensor]]:
    """Name, quantization config, tensors and what they stand for."""
    import numpy as np

    from tgi_cli.quantization.algorithms import grid
    from tgi_cli.quantization.algorithms.grid import rtn
    from tgi_cli.quantization.algorithms.layout import pack, quantization_config
    from tgi_cli.quantization.algorithms.recipe import Recipe, describe_recipe

    weight = torch.from_numpy(np.random.default_rng(0).standard_normal(SHAPE, np.float32) * 0.05)
    weight[5], weight[6] = weight[5].abs(), 0.0
    order = torch.from_numpy(np.random.default_rng(1).permutation(SHAPE[1]))

    def recipes() -> Iterator[Recipe]:
        for bits in (2, 3, 4, 8):
            for sym in (True, False):
                for layout in ("gptq", "gptq_v2"):
                    yield Recipe(method="rtn", bits=bits, sym=sym, group_size=32, format=layout)
                if bits != 3:
                    for size in (32, -1):
                        yield Recipe(
                            method="rtn",
                            bits=bits,
                            sym=sym,
                            group_size=size,
                            format="compressed-tensors",
                            scale_dtype=torch.float32,
                        )
        for layout in ("gptq", "gptq_v2"):
            yield Recipe(method="gptq", sym=False, group_size=64, desc_act=True, format=layout)
        for sym in (True, False):
            yield Recipe(method="awq", sym=sym, group_size=64, format="awq")
        for method, size in (("fp8", -1), ("fp8", 0), ("int8", -1)):
            yield Recipe(
                method=method,
                bits=8,
                group_size=size,
                format="compressed-tensors",
                scale_dtype=torch.float32,
            )

    for recipe in recipes():
        result = rtn(weight, recipe)
        if recipe.desc_act:  # as if inputs had been gone through in this order
            codes, groups = result.codes[:, order], result.groups[order]
            result = replace(result, codes=codes.contiguous(), groups=groups)
        name = f"{recipe.format}: {describe_recipe(recipe)}"
        yield name, quantization_config(recipe, []), pack(result, recipe), grid.dequantize(result)


def write(path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    configs: dict[str, dict[str, Any]] = {}
    for number, (name, config, parts, expected) in enumerate(cases()):
        configs[str(number)] = {"name": name, "config": config}
        tensors |= {f"{number}.{suffix}": each for suffix, each in parts.items()}
        tensors[f"{number}.{EXPECTED}"] = expected
    save_file(tensors, path, metadata={"cases": json.dumps(configs)})


def by_gptqmodel(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight [out, in] as gptqmodel's own class for torch has it."""
    outputs, inputs = SHAPE
    if config["quant_method"] == "awq":
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

        weight: torch.Tensor = dequantize_gemm(
            tensors["qweight"],
            tensors["qzeros"],
            tensors["scales"].float(),
            4,
            config["group_size"],
        )
        return weight.T
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    layer = TorchLinear(
        bits=config["bits"],
        group_size=config["group_size"],
        sym=config["sym"],
        desc_act=config["desc_act"],
        in_features=inputs,
        out_features=outputs,
        register_buffers=True,
    )
    layer.load_state_dict(tensors, strict=True)
    layer.scales = layer.scales.float()
    if config["checkpoint_format"] == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, config["bits"], torch.int32)
    layer.eval()
    weight = layer.dequantize_weight()
    return weight.T


def by_compressed_tensors(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight as the library's decompressor has it, with scales in float32."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    tensors = dict(tensors, weight_scale=tensors["weight_scale"].float())
    weight: torch.Tensor = compressor.decompress(tensors, scheme)["weight"]
    return weight


LIBRARIES = {"gptqmodel": by_gptqmodel, "compressed-tensors": by_compressed_tensors}


def read(path: Path, notes: Path) -> int:
    installed = {}
    for library in LIBRARIES:
        try:
            installed[library] = version(library)
        except PackageNotFoundError:
            continue
    found, failed = json.loads(notes.read_text()) if notes.exists() else {}, 0
    with safe_open(path, framework="pt") as file:
        for number, case in json.loads(file.metadata()["cases"]).items():
            method = case["config"]["quant_method"]
            library = "compressed-tensors" if method == "compressed-tensors" else "gptqmodel"
            if library not in installed:
                continue
            tensors = {
                name.partition(".")[2]: file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 (not a mapping)
                if name.startswith(f"{number}.")
            }
            expected = tensors.pop(EXPECTED)
            weight = LIBRARIES[library](case["config"], dict(tensors)).float()
            if torch.equal(weight, expected):
                found[case["name"]] = {
                    "library": f"{library} {installed[library]}",
                    "digest": digest(tensors),
                }
            else:
                failed += 1
                off = float((weight - expected).abs().max())
                print(f"{case['name']}: {library} reads it otherwise, by {off}", file=sys.stderr)
    notes.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    return int(bool(failed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("write", "read"))
    parser.add_argument("file", type=Path)
    parser.add_argument("notes", type=Path, nargs="?", help="JSON that digests are added to")
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.file)
    else:
        if arguments.notes is None:
            parser.error("where are the digests to go?")
        raise SystemExit(read(arguments.file, arguments.notes))


if __name__ == "__main__":
    main()
