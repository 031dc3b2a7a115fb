"""Classes that transformers' modules run over our caches: logits in mixed steps, by kind.

More of them are in generic_cases.py, and run the whole engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tools.paged_run import load
from tests.tools.survey import survey
from tgi_cli.models.hf.towers import towers_without_libraries

KINDS = {
    # Recurrent states, and attention beside them.
    "InklingForCausalLM": "windows [24, None]; states in",
    "Inkling2ForCausalLM": "windows [24, None]; states in",
    "Inkling2ForConditionalGeneration": "windows [24, None]; states in",
    "RecurrentGemmaForCausalLM": "windows [24]; states in",
    "RwkvForCausalLM": "states in 12 layers",
    # Windows, values of another width, attention by code of their own.
    "MiMoV2FlashForCausalLM": "windows [24, None]",
    "GPTNeoForCausalLM": "windows [24, None]",
    "GitForCausalLM": "windows [None]",
    # Positions that are counted from the cache's length.
    "MarianForCausalLM": "windows [None]",
    # The text part of models that take images.
    "ChameleonForConditionalGeneration": "windows [None]",
    "Cohere2VisionForConditionalGeneration": "windows [24, None]",
    "Kosmos2_5ForConditionalGeneration": "windows [None]",
    "LlavaForConditionalGeneration": "windows [None]",
    "Phi4MultimodalForCausalLM": "windows [None]",
}


@pytest.mark.tgi_pain(1)
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    outcome, why = survey(name, tmp_path)
    assert outcome == "runs", why
    assert KINDS[name] in why


def test_tensors_of_a_tower_that_is_not_built_are_not_read(tmp_path: Path) -> None:
    """Its layers are those of the library timm, which is not needed for text."""
    name = "PerceptionLMForConditionalGeneration"
    with towers_without_libraries():
        outcome, why = survey(name, tmp_path)
    assert outcome == "runs", why
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.vision_tower.timm_model.blocks.0.attn.qkv.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path)
