"""Scales of an 8-bit KV cache, as calibrated checkpoints have them.

Keys and values are divided by these before they are rounded to 8-bit floats. Tools write them as
``k_scale`` and ``v_scale`` of an attention module, or of its projections:
https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from tgi_cli.attention import KVScales, KVSpec
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.layers.attention import Attention
from tgi_cli.models.base import CausalLM
from tgi_cli.models.checkpoint import read_headers, read_tensor
from tgi_cli.models.stored_tensor import StoredTensor

_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:\w+\.)?([kv])_scale")


def kv_scales(path: Path, model: CausalLM) -> dict[int, KVScales]:
    """The scales of a checkpoint, by the index of the layer's cache; empty if there are none.

    Args:
        path: folder of the checkpoint.
        model: loaded from it.

    Raises:
        UnsupportedModelError: there are several scales per layer, one for each head.
        CheckpointError: a file cannot be read.
    """
    found: dict[int, dict[str, float]] = {}
    for name, stored in read_headers(path).items():
        matched = _NAME.fullmatch(name)
        if matched is not None:
            number, kind = int(matched[1]), matched[2]
            found.setdefault(number, {})["key" if kind == "k" else "value"] = _scale(stored)
    if not found:
        return {}
    scales = {}
    for path_of, module in model.named_modules():
        place = re.search(r"layers\.(\d+)\.", path_of + ".")
        if place is None or not isinstance(module, Attention) or module.shared:
            continue
        own = found.get(int(place[1]))
        if own is not None and _scalable(model.kv_specs[module.layer]):
            scales[module.layer] = KVScales(**own)
    return scales


def _scalable(spec: KVSpec) -> bool:
    return not (spec.values_in_keys or spec.gathered or spec.index)


def _scale(stored: StoredTensor) -> float:
    if math.prod(stored.shape) != 1:
        raise UnsupportedModelError(
            f"{stored.name} has {math.prod(stored.shape)} scales: only one per layer is supported "
            "in an 8-bit KV cache",
            "leave --kv-cache-dtype off",
        )
    scale = float(read_tensor(stored).float().item())
    # Tools write 0 or -1 where nothing was calibrated.
    return scale if scale > 0.0 and math.isfinite(scale) else 1.0
