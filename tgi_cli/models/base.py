"""The interfaces of causal language models and of encoder-decoder models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tgi_cli.attention import KVSpec, PagedAttention, StateSpec
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.layers import Embedding, Loadable, PositionEmbedding
from tgi_cli.layers.experts import Expert
from tgi_cli.layers.moe import MoE
from tgi_cli.models.vision import VisionTower
from tgi_cli.models.weight_map import Source

VISION = "vision."
"""Prefix of the names of a tower's tensors in the model."""


class CapturedStates:
    """The inputs of some layers, as one forward pass reaches them.

    Args:
        layers: their indices; the number of layers stands for the last layer's output.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._states: dict[int, Tensor] = {}

    def offer(self, layer: int, hidden: Tensor, residual: Tensor | None = None) -> None:
        """Take the input of a layer, ``hidden`` plus ``residual``, if it is wanted."""
        if layer in self.layers:
            # Always a copy: layers overwrite the residual.
            self._states[layer] = hidden.clone() if residual is None else hidden + residual

    def joined(self) -> Tensor:
        """[T, layers * hidden], in the order of ``layers``."""
        return torch.cat([self._states[layer] for layer in self.layers], dim=-1)


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Tokens of a step that stand for parts of images.

    Attributes:
        indices: int64 [N], of the step's flat tokens, in ascending order.
        features: [N, hidden], which replace their embeddings, after any factor of these.
        deepstack: each [N, hidden], added to the output of the first decoder layers in turn
            (Qwen3-VL, https://arxiv.org/abs/2406.04334).
    """

    indices: Tensor
    features: Tensor
    deepstack: tuple[Tensor, ...] = ()

    def add_deepstack(self, layer: int, hidden: Tensor) -> None:
        """Add what comes after a decoder layer to its output [T, hidden], in place."""
        hidden.index_add_(0, self.indices, self.deepstack[layer].to(hidden.dtype))


class LoadableModel(nn.Module):
    """A model that a loader fills from a checkpoint: :class:`~tgi_cli.layers.Loadable` layers.

    Attributes:
        ignored: regular expressions for whole names of unneeded tensors that a checkpoint may have.
    """

    ignored: tuple[str, ...] = ()

    def source(self, name: str) -> Source:
        """Where the checkpoint has the tensor that the model calls ``name``."""
        return Source((name,))

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take, packed and quantized as they are."""
        packed = [layer.packed_bytes for layer in self.modules() if isinstance(layer, Loadable)]
        return sum(packed) + sum(weight.nbytes for weight in self.parameters())


class CausalLM(LoadableModel):
    """A decoder over flat batches, for inference only.

    Built without weights: a loader fills its :class:`~tgi_cli.layers.Loadable` layers.
    ``kv_specs`` has one entry per layer of the KV cache, ``state_specs`` one per layer that keeps a
    recurrent state, each in the order of their own indices.
    """

    kv_specs: list[KVSpec]
    state_specs: Sequence[StateSpec] = ()
    vision: VisionTower | None
    """Encodes images; None if the model takes none, or is served without."""
    image_refusal: str
    """Why it takes no images, to complete "this model takes no images: ..."."""
    captures_states = False
    """Whether the model supports :meth:`forward_capturing`."""
    position_axes = 1
    """3 if positions within an image have three axes (time, height, width): the model then takes
    positions int64 [3, T], or [T] where all three are equal."""
    leaves_out = ""
    """A warning for the log about parts of the checkpoint's model that the decoder lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = None  # of an instance: a class attribute would hide the module
        self.image_refusal = ""

    def source(self, name: str) -> Source:
        if self.vision is not None and name.startswith(VISION):
            return self.vision.source(name.removeprefix(VISION))
        return self.text_source(name)

    def text_source(self, name: str) -> Source:
        """Where the checkpoint has a tensor of the decoder."""
        return Source((name,))

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Token ids int64 [T] and positions to hidden states [T, hidden].

        Positions are int64 [T], or [3, T] with three :attr:`position_axes`. ``attention`` has been
        planned for this step. ``images`` has the vectors of the tokens that stand for parts of
        images, if there are any; the ids of these may be outside of the vocabulary.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden] to float32 logits [N, vocab]."""

    @property
    def own_vocabulary(self) -> range | None:
        """The tokens whose logits :meth:`own_logits` computes; None if it computes none.

        The ranges of all shards follow each other and make up the vocabulary.
        """
        return None

    def own_logits(self, hidden: Tensor) -> Tensor:
        """This shard's columns [N, W] of :meth:`logits`, without the other shards.

        Raises:
            TypeError: there is no :attr:`own_vocabulary`.
        """
        raise TypeError(f"{type(self).__name__} does not give its part of the logits")

    def forward_capturing(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        captured: CapturedStates,
        images: ImageRows | None = None,
    ) -> Tensor:
        """As :meth:`forward`; ``captured`` takes the inputs of its layers.

        Raises:
            TypeError: unless ``captures_states``.
        """
        raise TypeError(f"{type(self).__name__} does not give the inputs of its layers")

    def token_vectors(self, input_ids: Tensor) -> Tensor:
        """The vectors of tokens as the table has them, int64 [N] to [N, hidden].

        Raises:
            UnsupportedModelError: the model does not give them.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} does not give token vectors, which the draft head needs",
            "use a draft head for a model of a built-in family",
        )

    @property
    def kv_window(self) -> int | None:
        """Positions that any layer sees of a sequence; None if a layer has no window or chunks.

        Cached positions outside the window are never read again.
        """
        # A span that is visible as a whole reaches beyond the window.
        reaches = [None if spec.spans == "whole" else spec.reach for spec in self.kv_specs]
        if not reaches or None in reaches:
            return None
        return max(reach for reach in reaches if reach is not None)

    def bytes_read(self, rows: int) -> int:
        """Bytes of weights that a decode of ``rows`` sequences reads, of this shard.

        Tables of embeddings are not counted, as few of their rows are read, nor is an image
        encoder. Experts are counted as if ``rows`` tokens chose evenly among them.
        """
        sizes: dict[int, float] = {}
        unread: set[nn.Module] = set() if self.vision is None else set(self.vision.modules())

        def add(module: nn.Module, share: float) -> None:
            if isinstance(module, Embedding | PositionEmbedding) or module in unread:
                return
            for parameter in module.parameters(recurse=False):
                sizes[parameter.data_ptr()] = parameter.nbytes * share
            if isinstance(module, Loadable) and module.packed_bytes:
                sizes[id(module)] = module.packed_bytes * share

        for module in self.modules():
            add(module, 1.0)
        for mixture in self.modules():
            if isinstance(mixture, MoE):
                experts = [each for each in mixture.experts.modules() if isinstance(each, Expert)]
                share = 1 - (1 - mixture.top_k / len(experts)) ** rows
                for expert in experts:
                    for module in expert.modules():
                        add(module, share)
        return int(sum(sizes.values()))


@dataclass(frozen=True, slots=True)
class DecoderTokens:
    """The tokens of a sequence that a step of an encoder-decoder model computes.

    The sequence's blocks hold its encoder tokens from position 0 on, and those of the decoder,
    which begin with the one that it starts with, after them.

    Attributes:
        ids: int64 [n], the decoder's next known tokens, at least one.
        start: decoder tokens before them.
        samples: number of last tokens whose logits are needed.
        encoder_tokens: length P of the prompt.
        encoder_ids: int64 [P], if the encoder is to compute the prompt now; else None.
        block_table: int64 [blocks], all blocks of the sequence; later entries are not read.
    """

    ids: Tensor
    start: int
    samples: int
    encoder_tokens: int
    encoder_ids: Tensor | None
    block_table: Tensor


class EncoderDecoderLM(CausalLM):
    """An encoder that takes prompts, and a decoder that answers; not over flat batches."""

    @abstractmethod
    def decode(self, sequences: Iterable[DecoderTokens], attention: PagedAttention) -> Tensor:
        """Compute a step.

        Returns:
            float32 [N, vocab], the logits of all samples, in the order of their sequences.
        """

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Raises TypeError: see :meth:`decode`."""
        raise TypeError("an encoder-decoder model has no flat batches")

    def logits(self, hidden: Tensor) -> Tensor:
        """Raises TypeError: see :meth:`decode`."""
        raise TypeError("an encoder-decoder model computes its logits with its decoder")
