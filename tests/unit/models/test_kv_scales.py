from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tools.checkpoints import make_llama
from tests.tools.paged_run import CPU, load
from tgi_cli.attention import KVScales, create_attention
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models import CausalLM
from tgi_cli.models.kv_scales import kv_scales


def with_scales(folder: Path, scales: dict[str, list[float] | float]) -> tuple[Path, CausalLM]:
    """A checkpoint of three layers, and its model, loaded before the scales were added."""
    path = make_llama(folder, num_hidden_layers=3)
    model = load(path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors |= {name: torch.tensor(value) for name, value in scales.items()}
    save_file(tensors, file, {"format": "pt"})
    return path, model


def test_scales_are_found_by_layer_whatever_module_has_them(tmp_path: Path) -> None:
    path, model = with_scales(
        tmp_path,
        {
            "model.layers.0.self_attn.k_scale": 0.5,
            "model.layers.0.self_attn.v_scale": [0.25],
            "model.layers.2.self_attn.k_proj.k_scale": 2.0,
            "model.layers.2.self_attn.v_proj.v_scale": 4.0,
            "model.layers.2.self_attn.q_scale": 8.0,
        },
    )
    assert kv_scales(path, model) == {0: KVScales(0.5, 0.25), 2: KVScales(2.0, 4.0)}


def test_what_was_not_calibrated_is_not_scaled(tmp_path: Path) -> None:
    names = ("k_scale", "v_scale")
    values = {f"model.layers.1.self_attn.{n}": v for n, v in zip(names, (-1.0, 0.0), strict=True)}
    path, model = with_scales(tmp_path, dict(values))
    assert kv_scales(path, model) == {1: KVScales(1.0, 1.0)}


def test_without_scales_there_are_none(tmp_path: Path) -> None:
    path = make_llama(tmp_path)
    assert kv_scales(path, load(path)) == {}


def test_scales_per_head_are_refused(tmp_path: Path) -> None:
    path, model = with_scales(tmp_path, {"model.layers.0.self_attn.k_scale": [0.5, 0.25]})
    with pytest.raises(UnsupportedModelError, match=r"layers.0.self_attn.k_scale has 2 scales"):
        kv_scales(path, model)


@pytest.mark.parametrize("backend", ["cpu", "native"])
def test_cpu_backends_say_that_they_do_not_scale(backend: str, tmp_path: Path) -> None:
    specs = load(make_llama(tmp_path)).kv_specs
    dtype = torch.bfloat16
    try:
        attention = create_attention(backend, specs, 32, dtype, CPU, torch.float8_e4m3fn)
    except ValueError as error:
        pytest.skip(str(error))
    assert not attention.use_scales({0: KVScales(2.0, 2.0)})
    assert attention.write_factors(0) == (1.0, 1.0)
