"""Rotary angles of positions on three axes, against transformers' modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Glm4vTextConfig, Qwen2VLTextConfig, Qwen3_5TextConfig, Qwen3VLTextConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vTextRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from tgi_cli.errors import ModelError
from tgi_cli.layers import RotaryEmbedding

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SECTIONS = {"mrope_section": [6, 5, 5], "rope_theta": 1e4}


def ours(parameters: dict[str, Any], dims: int = 32) -> RotaryEmbedding:
    return RotaryEmbedding(dims, parameters, 4096, torch.float32, CPU)


def positions(seed: int, largest: int = 4000) -> torch.Tensor:
    return torch.randint(largest, (3, 200), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("module", "config", "interleaved"),
    [
        (Qwen2VLRotaryEmbedding, Qwen2VLTextConfig, False),
        (Qwen3VLTextRotaryEmbedding, Qwen3VLTextConfig, True),
    ],
)
@pytest.mark.parametrize("sections", [[6, 5, 5], [8, 4, 4], [2, 7, 7]])
def test_angles_are_transformers(
    module: Any, config: Any, interleaved: bool, sections: list[int]
) -> None:
    parameters = {"rope_type": "default", **SECTIONS, "mrope_section": sections}
    sized = {"head_dim": 32} if config is Qwen3VLTextConfig else {}
    theirs = module(config(**SIZES, **sized, rope_parameters=dict(parameters)))
    rope = ours(parameters | {"mrope_interleaved": interleaved})
    for seed in range(3):
        where = positions(seed)
        cosines, sines = rope(where)
        wanted = theirs(torch.zeros(1, 1), where[:, None])
        assert cosines.shape == sines.shape == (200, 1, 32)
        torch.testing.assert_close(cosines[:, 0], wanted[0][0], atol=2e-6, rtol=0)
        torch.testing.assert_close(sines[:, 0].abs(), wanted[1][0].abs(), atol=2e-6, rtol=0)
        torch.testing.assert_close(sines[:, 0, 16:], wanted[1][0, :, 16:], atol=2e-6, rtol=0)


def test_partly_rotated_heads_have_the_axes_of_their_rotated_dimensions() -> None:
    shared = {"partial_rotary_factor": 0.5, "rope_theta": 1e4, "rope_type": "default"}
    where = positions(7)
    config = Qwen3_5TextConfig(
        **SIZES, head_dim=32, rope_parameters=shared | {"mrope_section": [3, 3, 2]}
    )
    wanted = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1, 1), where[:, None])
    rope = ours(shared | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}, dims=16)
    torch.testing.assert_close(rope(where)[0][:, 0], wanted[0][0], atol=2e-6, rtol=0)
    glm = Glm4vTextConfig(**SIZES, rope_parameters=shared | {"mrope_section": [2, 3, 3]})
    wanted = Glm4vTextRotaryEmbedding(glm)(torch.zeros(1, 1), where[:, None])
    rope = ours(shared | {"mrope_section": [2, 3, 3]}, dims=16)
    # GLM's neighbouring dimensions are a pair.
    torch.testing.assert_close(rope(where)[0][:, 0, :8], wanted[0][0, :, ::2], atol=2e-6, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("largest", [300, 20000])
def test_equal_axes_have_the_bits_of_one(interleaved: bool, largest: int) -> None:
    """A text's tokens do not change with an image in their step."""
    rope = ours(SECTIONS | {"mrope_interleaved": interleaved})
    where = torch.arange(largest - 290, largest)
    for plain, by_axis in zip(rope(where), rope(where.expand(3, -1)), strict=True):
        assert torch.equal(plain, by_axis)


def test_one_axis_and_three_do_not_mix() -> None:
    with pytest.raises(ValueError, match="positions on three axes"):
        ours({"rope_theta": 1e4})(positions(0))


@pytest.mark.parametrize("sections", [[6, 5, 4], [16], "all", [8, -4, 12], [6.0, 5, 5]])
def test_sections_that_do_not_fit_are_refused(sections: Any) -> None:
    with pytest.raises(ModelError, match="mrope_section"):
        ours({"rope_theta": 1e4, "mrope_section": sections})


def test_the_older_name_of_the_kind_is_read() -> None:
    where = positions(1)
    older = ours({"type": "mrope", **SECTIONS})
    assert torch.equal(older(where)[0], ours(SECTIONS)(where)[0])
