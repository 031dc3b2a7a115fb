"""What Gemma 3n and 4 have beside attention and MLP: embeddings per layer, several streams."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tgi_cli.layers import ops
from tgi_cli.layers.base import Build, Loadable, WeightSlot, empty_parameter
from tgi_cli.layers.embedding import Embedding
from tgi_cli.layers.linear import ReplicatedLinear
from tgi_cli.layers.norm import RMSNorm


class PerLayerEmbedding(nn.Module):
    """A vector of a token for each layer: from a table, and from the token's embedding.

    https://ai.google.dev/gemma/docs/gemma-3n#ple-caching. Tokens beyond the table have its first
    row.

    Args:
        build: dtype, quantization, shard.
        hidden_size: width of the token's embedding.
        num_layers: L.
        vocab_size: rows of the table.
        width: width of a layer's vector.
        eps: epsilon of the norm of what the embedding is projected to.
    """

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        num_layers: int,
        vocab_size: int,
        width: int,
        eps: float,
    ) -> None:
        super().__init__()
        self.width = width
        self.vocab_size = vocab_size
        self.scale = hidden_size**-0.5
        self.table = Embedding(build, vocab_size, num_layers * width)
        self.projection = ReplicatedLinear(build, hidden_size, num_layers * width, bias=False)
        self.norm = RMSNorm(build, width, eps)

    def forward(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """Token ids [T] and their embeddings [T, hidden] to [T, L, width]."""
        known = input_ids.masked_fill(input_ids >= self.vocab_size, 0)
        # The factors are rounded to the model's dtype, as where these models were trained.
        root = torch.tensor(self.width**0.5, dtype=embedded.dtype)
        own = self.table(known).unflatten(1, (-1, self.width)) * root
        scale = torch.tensor(self.scale, dtype=embedded.dtype)
        projected = (self.projection(embedded) * scale).view(-1, self.width)
        together: Tensor = self.norm(projected).view(own.shape).add_(own)
        return together.mul_(torch.tensor(0.5**0.5, dtype=embedded.dtype))


class PerLayerInput(nn.Module):
    """Lets a layer's own embedding of the token in: norm(project(activation(gate(x)) * own))."""

    def __init__(
        self, build: Build, hidden_size: int, width: int, eps: float, activation: str
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate = ReplicatedLinear(build, hidden_size, width, bias=False)
        self.projection = ReplicatedLinear(build, width, hidden_size, bias=False)
        self.norm = RMSNorm(build, hidden_size, eps)

    def forward(self, hidden: Tensor, own: Tensor) -> Tensor:
        """Hidden states [T, hidden] and this layer's embeddings [T, width] to [T, hidden]."""
        gate = ops.activate(self.gate(hidden), self.activation) * own
        added: Tensor = self.norm(self.projection(gate))
        return added


class Scalar(Loadable):
    """One learned number."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.weight = empty_parameter(1, dtype=build.dtype)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield self.slot(path, "weight", (1,))


class Vector(Loadable):
    """A learned factor for each feature."""

    def __init__(self, build: Build, size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=build.dtype)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield self.slot(path, "weight", tuple(self.weight.shape))


class AltUp(nn.Module):
    """Streams of hidden states around a layer that computes one of them (Gemma 3n).

    AltUp, https://arxiv.org/abs/2301.13310: before the layer each stream is predicted from all,
    after it each is corrected by how far the computed one is off its prediction. Sums are in a
    fixed order, so that a token's do not depend on what shares its step.

    Args:
        build: dtype, quantization, shard.
        hidden_size: H.
        num_streams: S.
        active: index of the stream that layers compute.
        eps: epsilon of the norms.
        laurel_rank: inner width of the layer's low-rank branch.
        scale_active: whether what per-layer embeddings are gated by is scaled by feature.
    """

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        num_streams: int,
        active: int,
        eps: float,
        laurel_rank: int,
        scale_active: bool,
    ) -> None:
        super().__init__()
        self.active = active
        self.num_streams = num_streams
        self.router_scale = 1.0 / hidden_size
        self.router_norm = RMSNorm(build, hidden_size, eps)
        self.modality_router = ReplicatedLinear(build, hidden_size, num_streams, bias=False)
        self.prediction_coefs = ReplicatedLinear(build, num_streams, num_streams**2, bias=False)
        self.correction_coefs = ReplicatedLinear(build, num_streams, num_streams, bias=False)
        self.output_scale = Vector(build, hidden_size) if scale_active else None
        self.laurel_left = ReplicatedLinear(build, hidden_size, laurel_rank, bias=False)
        self.laurel_right = ReplicatedLinear(build, laurel_rank, hidden_size, bias=False)
        self.laurel_norm = RMSNorm(build, hidden_size, eps)

    def predict(self, streams: Tensor) -> Tensor:
        """[S, T, H] to as many predictions."""
        modalities = self._modalities(streams[self.active])
        factors = self.prediction_coefs(modalities).unflatten(1, (self.num_streams, -1))
        predicted = streams.clone()
        for to in range(self.num_streams):
            for source in range(self.num_streams):
                predicted[to] += streams[source] * factors[:, to, source, None]
        return predicted

    def correct(self, predictions: Tensor, computed: Tensor) -> Tensor:
        """The streams [S, T, H] after the layer made ``computed`` [T, H] of the active one."""
        factors: Tensor = self.correction_coefs(self._modalities(computed)) + 1.0
        innovation = computed - predictions[self.active]
        return predictions + innovation * factors.T[..., None]

    def laurel(self, normed: Tensor) -> Tensor:
        """The low-rank branch beside attention: [T, H] to [T, H]."""
        added: Tensor = self.laurel_norm(self.laurel_right(self.laurel_left(normed)))
        return normed + added

    def for_gate(self, streams: Tensor) -> Tensor:
        """What gates the layer's own embeddings, [T, H]."""
        active = streams[self.active]
        return active if self.output_scale is None else active * self.output_scale.weight

    def _modalities(self, active: Tensor) -> Tensor:
        return ops.tanh(self.modality_router(self.router_norm(active) * self.router_scale))


class Streams(nn.Module):
    """Makes the streams of :class:`AltUp` of an embedding, and in the end one of them again."""

    def __init__(self, build: Build, hidden_size: int, num_streams: int) -> None:
        super().__init__()

        def projections() -> nn.ModuleList:
            return nn.ModuleList(
                ReplicatedLinear(build, hidden_size, hidden_size, bias=False)
                for _ in range(1, num_streams)
            )

        self.split = projections()
        self.merge = projections()

    def open(self, hidden: Tensor) -> Tensor:
        """[T, H] to [S, T, H], all as large as the first."""
        size = _magnitude(hidden)
        return torch.stack([hidden, *(_resized(project(hidden), size) for project in self.split)])

    def close(self, streams: Tensor) -> Tensor:
        """[S, T, H] to their mean [T, H], all made as large as the first."""
        size = _magnitude(streams[0])
        total = streams[0].clone()
        for project, stream in zip(self.merge, streams[1:], strict=True):
            total += _resized(project(stream), size)
        return total / len(streams)


def _magnitude(hidden: Tensor) -> Tensor:
    return hidden.square().mean(-1, keepdim=True).sqrt_()


def _resized(hidden: Tensor, size: Tensor) -> Tensor:
    own = hidden.square().mean(-1, keepdim=True).clamp_min_(1e-5).sqrt_()
    return hidden * size / own
