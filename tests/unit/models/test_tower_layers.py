"""Operations of towers that are replaced: what is recognized, and that results stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionPatchEmbed,
    Qwen2_5_VLMLP,
    Qwen2_5_VLRMSNorm,
)

from tests.parity.families import make_checkpoint
from tests.parity.vision_cases import VISION_CASES
from tests.tools.paged_run import CPU
from tgi_cli.layers import Build
from tgi_cli.models import load_model, read_config
from tgi_cli.models.hf import tower_layers
from tgi_cli.models.hf.tower_layers import replace_operations
from tgi_cli.quantization import Unquantized


class Config:
    hidden_size = 16
    intermediate_size = 24
    hidden_act = "gelu_pytorch_tanh"


class Unlike(nn.Module):
    """Named and built as a norm, but it is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


UnlikeRMSNorm = type("UnlikeRMSNorm", (Unlike,), {})


def replaced(module: nn.Module) -> bool:
    holder = nn.ModuleDict({"part": module})
    replace_operations(holder, Build(torch.float32, Unquantized()))
    return holder["part"] is not module or "forward" in module.__dict__


@pytest.mark.parametrize(
    ("make", "known"),
    [
        (lambda: Qwen2_5_VLRMSNorm(16), True),
        (lambda: Gemma3RMSNorm(16), False),
        (UnlikeRMSNorm, False),
        (lambda: nn.LayerNorm(16), False),
        (lambda: CLIPMLP(Config()), True),
        (lambda: nn.Linear(16, 24), False),
        (lambda: Qwen2_5_VisionPatchEmbed(4, 2, 3, 8).proj, True),
        (lambda: nn.Conv3d(3, 8, 4, stride=2), False),
    ],
)
def test_what_is_recognized(make: Any, known: bool) -> None:
    assert replaced(make()) is known


@pytest.mark.parametrize("make", [lambda: Qwen2_5_VLRMSNorm(16), lambda: CLIPMLP(Config())])
def test_results_stay_the_same(make: Any) -> None:
    torch.manual_seed(0)
    module = make()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 5, 16)
    with torch.inference_mode():
        wanted = module(x)
        assert replaced(module)
        torch.testing.assert_close(module(x), wanted)


def test_patches_are_a_product() -> None:
    torch.manual_seed(0)
    embedding = Qwen2_5_VisionPatchEmbed(4, 2, 3, 8)
    patches = torch.randn(10, 3 * 2 * 4 * 4)
    with torch.inference_mode():
        wanted = embedding(patches)
        assert replaced(embedding.proj)
        torch.testing.assert_close(embedding(patches), wanted)


def test_activations_are_told_apart() -> None:
    for name in ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu"):
        assert tower_layers.activation_of(ACT2FN[name]) == name
    assert tower_layers.activation_of(ACT2FN["gelu_10"]) is None


def test_a_gated_block_becomes_two_products(tmp_path: Path) -> None:
    folder = make_checkpoint(VISION_CASES["Qwen2.5-VL"].case, tmp_path)
    tower = load_model(read_config(folder), torch.float32, CPU).vision
    assert tower is not None
    kinds = {type(module).__name__ for module in tower.modules()}
    assert Qwen2_5_VLMLP.__name__ not in kinds
    assert "_GatedFeedForward" in kinds


@pytest.mark.parametrize("name", ["SmolVLM", "LLaVA-NeXT", "InternVL 3"])
def test_tiles_are_encoded_one_after_the_other(name: str, tmp_path: Path) -> None:
    case = VISION_CASES[name]
    tower = load_model(read_config(make_checkpoint(case.case, tmp_path)), torch.float32, CPU).vision
    assert tower is not None
    image, called = case.image(0), 0

    def count(*_: object) -> None:
        nonlocal called
        called += 1

    hooks = [layer.register_forward_pre_hook(count) for layer in tower.layers]
    tower.encode(image, None)
    for hook in hooks:
        hook.remove()
    assert called == tower.calls(image) > len(tower.layers)
    assert tower.parts % len(tower.layers) == 0
