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
from tgi_cli.models.weight_map import Source


class CapturedStates:
    """The inputs of some layers, as one forward pass reaches them.

    Args:
        layers: their indices; as many as there are layers stands for the last layer's output.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._states: dict[int, Tensor] = {}

    def offer(self, layer: int, hidden: Tensor, residual: Tensor | None = None) -> None:
        """Take the input of a layer, ``hidden`` plus ``residual``, if it is wanted."""
        if layer in self.layers:
            # A copy in any case: layers overwrite the residual.
            self._states[layer] = hidden.clone() if residual is None else hidden + residual

    def joined(self) -> Tensor:
        """[T, layers * hidden], in the order of ``layers``."""
        return torch.cat([self._states[layer] for layer in self.layers], dim=-1)


class LoadableModel(nn.Module):
    """What a loader fills from a checkpoint: :class:`~tgi_cli.layers.Loadable` layers.

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
    captures_states = False
    """Whether :meth:`forward_capturing` is for this model."""

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        """Token ids and positions, int64 [T], to hidden states [T, hidden].

        ``attention`` has been planned for this step.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden] to float32 logits [N, vocab]."""

    def forward_capturing(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        captured: CapturedStates,
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

        Cached positions behind the window are never read again.
        """
        reaches = [spec.reach for spec in self.kv_specs]
        if not reaches or None in reaches:
            return None
        return max(reach for reach in reaches if reach is not None)

    def bytes_read(self, rows: int) -> int:
        """Bytes of weights that a decode of ``rows`` sequences reads, of this shard.

        Tables of embeddings are not counted: few of their rows are read. Of the experts as many
        are counted as so many tokens choose, if they choose evenly.
        """
        sizes: dict[int, float] = {}

        def add(module: nn.Module, share: float) -> None:
            if isinstance(module, Embedding | PositionEmbedding):
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
    """What a step computes of one sequence of an encoder-decoder model.

    The sequence's blocks hold its encoder tokens from position 0 on, and those of the decoder,
    which begin with the one that it starts with, behind them.

    Attributes:
        ids: int64 [n], the decoder's next known tokens, at least one.
        start: decoder tokens before them.
        samples: after how many of them, the last ones, logits are wanted.
        encoder_tokens: length P of the prompt.
        encoder_ids: int64 [P], if the encoder is to compute the prompt now; None if it has done so.
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

    def forward(self, input_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        """Raises TypeError: see :meth:`decode`."""
        raise TypeError("an encoder-decoder model has no flat batches")

    def logits(self, hidden: Tensor) -> Tensor:
        """Raises TypeError: see :meth:`decode`."""
        raise TypeError("an encoder-decoder model computes its logits with its decoder")
