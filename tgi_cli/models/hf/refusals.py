"""Classes of transformers that are known not to be models of a text that is continued."""

from __future__ import annotations

from tgi_cli.models.hf.masks import Unsupported

_NEEDS_IMAGE = "takes an image with every text"
_DRAFTS = "drafts for another model, and attends to that model's keys and values"
_MUSIC = "makes music: a step predicts a token of each of several codebooks"

REASONS = {
    "BlipForConditionalGeneration": _NEEDS_IMAGE,
    "Blip2ForConditionalGeneration": _NEEDS_IMAGE,
    "BltForCausalLM": "cuts bytes into patches where they are hard to predict",
    "CpmAntForCausalLM": "attends to the tokens of a prompt that come later, too",
    "DeepseekV4ForCausalLM": "compresses several tokens into one key and value",
    "DiffusionGemmaForBlockDiffusion": "writes a text by diffusion, a block of tokens at once",
    "Gemma4AssistantForCausalLM": _DRAFTS,
    "Gemma4UnifiedAssistantForCausalLM": _DRAFTS,
    "IdeficsForVisionText2Text": _NEEDS_IMAGE,
    "InstructBlipForConditionalGeneration": _NEEDS_IMAGE,
    "InstructBlipVideoForConditionalGeneration": "takes a video with every text",
    "Kosmos2ForConditionalGeneration": _NEEDS_IMAGE,
    "MusicgenForCausalLM": _MUSIC,
    "MusicgenMelodyForCausalLM": _MUSIC,
    "PI0ForConditionalGeneration": "predicts the actions of a robot",
    "ProphetNetForCausalLM": "attends in a stream of its own for each of several next tokens",
    "ReformerModelWithLMHead": "attends to the tokens whose hashes are equal",
    "UnlimitedOcrForConditionalGeneration": "attends to a whole prompt, and a window of its answer",
    "XLMWithLMHeadModel": "attends to tokens that come later, too",
    "XLNetLMHeadModel": "attends to tokens that come later, too",
}
"""By the name of the class; each completes "it ..."."""

ROUTES_TOGETHER = "routes a token to experts by the other tokens of its step"


def refuse(name: str) -> None:
    """Raise Unsupported if the class ``name`` is one of these."""
    if name in REASONS:
        raise Unsupported(REASONS[name])
