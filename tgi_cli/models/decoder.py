"""The model of every built-in family: what a DecoderSpec declares, built of shared layers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from tgi_cli.attention import PagedAttention
from tgi_cli.layers import (
    AltUp,
    Build,
    Embedding,
    LayerNorm,
    LMHead,
    PerLayerEmbedding,
    PerLayerInput,
    PositionEmbedding,
    RMSNorm,
    RotaryEmbedding,
    Scalar,
    Streams,
    Temperature,
)
from tgi_cli.layers.attention import ByPosition
from tgi_cli.models.base import CapturedStates, CausalLM, ImageRows
from tgi_cli.models.decoder_blocks import Caches, make_mixer, make_mlp
from tgi_cli.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LatentSpec,
    LayerSpec,
    NormSpec,
    RopeSpec,
    TemperatureSpec,
)
from tgi_cli.models.weight_map import Source

Norm = RMSNorm | LayerNorm


@dataclass(slots=True)
class LayerInputs:
    """Inputs of all layers of a step besides hidden states."""

    rotations: list[ByPosition]
    per_layer: Tensor | None = None
    """[T, layers, width]: each layer's own embeddings of the tokens."""


class DecoderLayer(nn.Module):
    """A mixer and an MLP around the residual, as a :class:`LayerSpec` arranges them.

    The mixer is a submodule by the name that checkpoints have for its kind, such as ``self_attn``.
    """

    def __init__(self, build: Build, spec: LayerSpec, hidden_size: int, caches: Caches) -> None:
        super().__init__()
        self.index = caches.layers
        caches.layers += 1
        self.rope = spec.mixer.rope if isinstance(spec.mixer, AttentionSpec | LatentSpec) else None
        self.residual_scale = spec.residual_scale
        self.parallel = spec.parallel
        self.input_norm = _norm(build, spec.input_norm, hidden_size)
        self.mixer_name = ""
        if spec.mixer is not None:
            self.mixer_name, mixer = make_mixer(build, spec.mixer, hidden_size, caches)
            self.add_module(self.mixer_name, mixer)
        self.mixer_output_norm = _norm(build, spec.mixer_output_norm, hidden_size)
        self.mlp_norm = _norm(build, spec.mlp_norm, hidden_size)
        self.mlp = None if spec.mlp is None else make_mlp(build, spec.mlp, hidden_size)
        self.mlp_output_norm = _norm(build, spec.mlp_output_norm, hidden_size)
        self.per_layer: PerLayerInput | None = None
        if (own := spec.per_layer) is not None:
            self.per_layer = PerLayerInput(build, hidden_size, own.width, own.eps, own.activation)
        self.scalar = Scalar(build) if spec.output_scalar else None

    @property
    def mixer(self) -> nn.Module | None:
        """What mixes the tokens of a sequence; None in a layer that has an MLP alone."""
        return self._modules[self.mixer_name] if self.mixer_name else None

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        inputs: LayerInputs,
        attention: PagedAttention,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output, not yet added to the residual, and the residual.

        The residual is None if it was already added.
        """
        rotation = None if self.rope is None else inputs.rotations[self.rope]
        mixer, mlp = self.mixer, self.mlp
        if self.parallel and mixer is not None and mlp is not None:
            normed, residual = _add(self.input_norm, hidden, residual)
            other = normed if self.mlp_norm is None else self.mlp_norm(residual)
            mixed: Tensor = mixer(normed, rotation, attention)
            return mixed.add_(mlp(other)), residual
        if mixer is not None:
            normed, residual = _add(self.input_norm, hidden, residual)
            hidden = self._output(self.mixer_output_norm, mixer(normed, rotation, attention))
        if mlp is not None:
            normed, residual = _add(self.mlp_norm, hidden, residual)
            hidden = self._output(self.mlp_output_norm, mlp(normed))
        if self.per_layer is not None and inputs.per_layer is not None:
            residual = hidden if residual is None else residual.add_(hidden)
            hidden = self.per_layer(residual, inputs.per_layer[:, self.index])
        if self.scalar is not None:
            hidden = hidden if residual is None else residual.add_(hidden)
            return hidden.mul_(self.scalar.weight), None
        return hidden, residual

    def _output(self, norm: Norm | None, added: Tensor) -> Tensor:
        if norm is not None:
            added = norm(added)
        return added if self.residual_scale == 1.0 else added.mul_(self.residual_scale)


class AltUpLayer(DecoderLayer):
    """A layer that computes one of several streams (Gemma 3n); see :class:`AltUp`.

    Its hidden states are [streams, T, hidden], its residual None.
    """

    MIXED_SCALE = 0.5**0.5
    """Factor of the sum of attention and the branch beside it."""

    def __init__(self, build: Build, spec: LayerSpec, hidden_size: int, caches: Caches) -> None:
        super().__init__(build, spec, hidden_size, caches)
        assert spec.altup is not None
        self.altup = AltUp(build, hidden_size, **asdict(spec.altup))

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        inputs: LayerInputs,
        attention: PagedAttention,
    ) -> tuple[Tensor, Tensor | None]:
        """The streams after the layer, and None."""
        assert self.input_norm is not None
        assert self.mlp_norm is not None
        assert self.mixer is not None
        assert self.mlp is not None
        predictions = self.altup.predict(hidden)
        active = predictions[self.altup.active]
        normed = self.input_norm(active)
        rotation = None if self.rope is None else inputs.rotations[self.rope]
        mixed = self._output(self.mixer_output_norm, self.mixer(normed, rotation, attention))
        mixed = (active + mixed + self.altup.laurel(normed)) * self.MIXED_SCALE
        computed = mixed + self._output(self.mlp_output_norm, self.mlp(self.mlp_norm(mixed)))
        streams = self.altup.correct(predictions, computed)
        if self.per_layer is not None and inputs.per_layer is not None:
            own = inputs.per_layer[:, self.index]
            streams[1:] += self.per_layer(self.altup.for_gate(streams), own)
        return streams, None


class DecoderModel(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, build: Build, spec: DecoderSpec, device: torch.device) -> None:
        super().__init__()
        self.shard = build.shard
        self.hidden_size = spec.hidden_size
        self.dtype = build.dtype
        if self.shard.is_first or (self.shard.is_last and spec.tie_word_embeddings):
            self.embed_tokens = Embedding(build, spec.vocab_size, spec.hidden_size)
        self.embedding_scale = spec.embedding_scale
        self.embed_positions = (
            None
            if spec.learned_positions is None or not self.shard.is_first
            else PositionEmbedding(build, spec.learned_positions, spec.hidden_size)
        )
        self.per_layer: PerLayerEmbedding | None = None
        if (own := spec.layers[0].per_layer) is not None:
            self.per_layer = PerLayerEmbedding(
                build, spec.hidden_size, len(spec.layers), own.vocab_size, own.width, own.eps
            )
        self.streams: Streams | None = None
        if (altup := spec.layers[0].altup) is not None:
            self.streams = Streams(build, spec.hidden_size, altup.num_streams)
        self.deepstack = spec.deepstack
        self.ropes = nn.ModuleList(_rope(build, rope, device) for rope in spec.ropes)
        indices = range(len(spec.layers)) if build.layers is None else build.layers
        self.caches = Caches(layers=indices.start)
        kind = DecoderLayer if self.streams is None else AltUpLayer
        self.layers = nn.ModuleList()
        for index in indices:  # under the names that they have in the whole model
            layer = kind(build, spec.layers[index], spec.hidden_size, self.caches)
            self.layers.add_module(str(index), layer)
        if self.shard.is_last:
            norm = _norm(build, spec.final_norm, spec.hidden_size)
            assert norm is not None
            self.norm = norm

    def embed(
        self, input_ids: Tensor, positions: Tensor, images: ImageRows | None = None
    ) -> tuple[Tensor, LayerInputs]:
        """The tokens' vectors, [T, hidden], and the other inputs of all layers.

        The vectors are what the stage before has computed, if there is one.
        """
        if not self.shard.is_first:
            received = self.shard.receive(positions.shape[-1], self.hidden_size, self.dtype)
            return received, LayerInputs([rope(positions) for rope in self.ropes])
        if images is not None:
            # Image tokens may have ids beyond the table; their vectors are replaced below.
            input_ids = input_ids.index_fill(0, images.indices, 0)
        hidden: Tensor = self.embed_tokens(input_ids)
        if self.embedding_scale != 1.0:
            # The factor is rounded to the model's dtype, as in these models' training.
            hidden = hidden * torch.tensor(self.embedding_scale, dtype=hidden.dtype)
        if images is not None:
            hidden.index_copy_(0, images.indices, images.features.to(hidden.dtype))
        if self.embed_positions is not None:
            hidden = hidden.add_(self.embed_positions(positions))
        inputs = LayerInputs([rope(positions) for rope in self.ropes])
        if self.per_layer is not None:
            inputs.per_layer = self.per_layer(input_ids, hidden)
        return hidden, inputs

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        captured: CapturedStates | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden], for the head or for the next stage, which is sent them."""
        hidden, inputs = self.embed(input_ids, positions, images)
        if self.streams is not None:
            hidden = self.streams.open(hidden)
        residual = None
        for index, layer in enumerate(self.layers):
            if captured is not None:
                captured.offer(index, hidden, residual)
            hidden, residual = layer(hidden, residual, inputs, attention)
            if images is not None and index < len(images.deepstack):
                hidden = hidden if residual is None else residual.add_(hidden)
                residual = None
                images.add_deepstack(index, hidden)
        if not self.shard.is_last:
            # One tensor instead of two: the next norm would add them up, with the same rounding.
            hidden = hidden if residual is None else residual.add_(hidden)
            self.shard.send(hidden)
            return hidden
        if captured is not None:
            captured.offer(len(self.layers), hidden, residual)
        if self.streams is not None:
            hidden = self.streams.close(hidden)
        return self.norm.add(hidden, residual)[0]


class DecoderForCausalLM(CausalLM):
    """The model of a built-in family."""

    def __init__(self, spec: DecoderSpec, build: Build, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.model = DecoderModel(build, spec, device)
        if build.shard.is_last:
            tied = self.model.embed_tokens if spec.tie_word_embeddings else None
            self.lm_head = LMHead(build, spec.hidden_size, spec.vocab_size, tied, spec.head_bias)
        self.kv_specs = self.model.caches.kv
        self.state_specs = self.model.caches.states
        self.ignored = spec.ignored
        self.captures_states = self.model.streams is None
        ropes = [rope for rope in spec.ropes if isinstance(rope, RopeSpec)]
        if any(rope.parameters.get("mrope_section") is not None for rope in ropes):
            self.position_axes = 3
        self.leaves_out = spec.notice

    def text_source(self, name: str) -> Source:
        return self.spec.source(name)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        images: ImageRows | None = None,
    ) -> Tensor:
        hidden: Tensor = self.model(input_ids, positions, attention, images=images)
        return hidden

    def forward_capturing(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        captured: CapturedStates,
        images: ImageRows | None = None,
    ) -> Tensor:
        """As :meth:`forward`; ``captured`` takes the inputs of its layers."""
        hidden: Tensor = self.model(input_ids, positions, attention, captured, images)
        return hidden

    def token_vectors(self, input_ids: Tensor) -> Tensor:
        """The vectors of tokens as the table has them, int64 [N] to [N, hidden]."""
        vectors: Tensor = self.model.embed_tokens(input_ids)
        return vectors

    def logits(self, hidden: Tensor) -> Tensor:
        return self._scaled(self.lm_head(hidden))

    @property
    def own_vocabulary(self) -> range | None:
        """See :attr:`CausalLM.own_vocabulary`."""
        return self.lm_head.own_vocabulary

    def own_logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`CausalLM.own_logits`."""
        return self._scaled(self.lm_head.own_logits(hidden))

    def _scaled(self, logits: Tensor) -> Tensor:
        """Logits as the model's configuration scales and bounds them, in place."""
        if self.spec.logit_scale != 1.0:
            logits = logits.mul_(self.spec.logit_scale)
        if self.spec.logit_softcap is not None:
            cap = self.spec.logit_softcap
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits


def _add(norm: Norm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The input of the block, and the residual with ``x`` added."""
    if norm is not None:
        return norm.add(x, residual)
    residual = x if residual is None else residual.add_(x)
    return residual, residual


def _norm(build: Build, spec: NormSpec | None, size: int) -> Norm | None:
    if spec is None:
        return None
    if spec.kind == "rms":
        return RMSNorm(build, size, spec.eps, spec.one_plus)
    return LayerNorm(build, size, spec.eps, spec.bias)


def _rope(build: Build, spec: RopeSpec | TemperatureSpec, device: torch.device) -> nn.Module:
    if isinstance(spec, TemperatureSpec):
        return Temperature(spec.scale, spec.period)
    return RotaryEmbedding(
        spec.dims, spec.parameters, spec.max_positions, build.dtype, device, build.max_positions
    )
