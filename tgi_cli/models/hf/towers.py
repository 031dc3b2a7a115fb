"""What a model has for images and sound within its text model, or by a library of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.utils.import_utils import is_timm_available, is_vision_available

from tgi_cli.models.hf.step_cache import rebind

_TOWERS = {
    "ChameleonModel": ("vqmodel",),
    "GitModel": ("image_encoder", "visual_projection", "img_temporal_embedding"),
}
"""Parts by model, of which texts need nothing."""

_INKLING = "transformers.models.inkling.modeling_inkling"


class _TextAlone(nn.Module):
    """Replaces a module that puts images and sound into the vectors of a text."""

    def forward(self, input_ids: Tensor, inputs_embeds: Tensor, **_: object) -> Tensor:
        return inputs_embeds


def leave_out_towers(decoder: nn.Module) -> list[str]:
    """Remove what a text model has for images and sound; returns the paths within it."""
    kind = type(decoder)
    if not kind.__module__.startswith("transformers.models."):
        return []
    if kind.__name__ == "Phi4MultimodalModel":
        decoder.embed_tokens_extend = _TextAlone()
        return ["embed_tokens_extend"]
    if kind.__name__ == "GitModel":
        rebind(decoder, {"create_causal_mask": _text_mask})
    removed = [name for name in _TOWERS.get(kind.__name__, ()) if hasattr(decoder, name)]
    for name in removed:
        delattr(decoder, name)
    return removed


def _text_mask(*, block_sequence_ids: object = None, **mask: Any) -> Any:
    """Git's, in which the tokens of an image attend to each other; a text has none."""
    return create_causal_mask(**mask)


@contextmanager
def towers_without_libraries() -> Iterator[None]:
    """Let models be built whose tower is made by timm or scipy, which text does not need.

    The class of the model has been imported.
    """

    def without_layers(tower: Any, config: Any) -> None:
        PreTrainedModel.__init__(tower, config)

    towers: list[Any] = []
    if not (is_timm_available() and is_vision_available()):
        towers.append(transformers.TimmWrapperModel)
    if _INKLING in sys.modules and find_spec("scipy") is None:
        towers.append(sys.modules[_INKLING].InklingVisionModel)
    with ExitStack() as stack:
        for tower in towers:
            stack.enter_context(mock.patch.object(tower, "__init__", without_layers))
        yield
