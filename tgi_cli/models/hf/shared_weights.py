"""Our layers in a model whose modules share weights, as encoder, decoder and head do a table."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tgi_cli.layers import Build
from tgi_cli.models.hf.layers import BatchedEmbedding, BatchedHead, UnreplacedWeights, linear
from tgi_cli.models.hf.masks import Unsupported
from tgi_cli.models.hf.products import reads_weight
from tgi_cli.models.weight_map import Source


class StoredWeights:
    """Where a checkpoint has the weights of a model, of which it need have tied ones only once.

    Args:
        found: sources of the model's weights, by name.
        tied: names of weights, to the names of those that they are tied to.
    """

    def __init__(self, found: Mapping[str, Source], tied: Mapping[str, str]) -> None:
        self._found = found
        groups: dict[str, list[str]] = defaultdict(list)
        for name, target in tied.items():
            while tied.get(target, target) != target:
                target = tied[target]
            groups[target].append(name)
        self._group: dict[str, list[str]] = {}
        for target, names in groups.items():
            members = [target, *names]
            self._group |= dict.fromkeys(members, members)

    def __contains__(self, name: object) -> bool:
        return any(each in self._found for each in self._group.get(cast(str, name), [name]))

    def source(self, name: str) -> Source:
        """Where the weight called ``name``, or one that it is tied to, is stored."""
        for each in (name, *self._group.get(name, ())):
            if each in self._found:
                return self._found[each]
        return Source((name,))

    def duplicates(self) -> Iterator[str]:
        """Expressions for the stored names of weights that are stored more than once."""
        for name in self._group:
            if name in self._found:
                yield from map(re.escape, self._found[name].names)


class SharedWeights(UnreplacedWeights):
    """Weights of a module of transformers that other modules use, too."""

    def __init__(self, module: nn.Module, path: str, stored: StoredWeights) -> None:
        super().__init__(module, path, stored, {})
        self._users: list[tuple[nn.Module, str, str]] = []

    def share(self, name: str, module: nn.Module, own_name: str) -> None:
        """Make the weight ``name`` that of ``module``, which calls it ``own_name``."""
        self._users.append((module, own_name, name))

    def materialize(self, device: torch.device) -> None:
        super().materialize(device)
        for module, own_name, name in self._users:
            setattr(module, own_name, getattr(self._module[0], name))


def replace_layers(
    whole: Any, build: Build, stored: StoredWeights, device: torch.device
) -> Iterator[UnreplacedWeights]:
    """Put our layers into an encoder-decoder model; yields the holders of the other weights.

    Sinusoids that are not stored are computed.
    """
    users: dict[Tensor, list[nn.Module]] = defaultdict(list)
    for module in whole.modules():
        for weight in module.parameters(recurse=False):
            users[weight].append(module)
    heads = {whole.get_output_embeddings()}
    tables: dict[Tensor, BatchedEmbedding] = {}
    for part in (whole, whole.get_encoder(), whole.get_decoder()):
        named = hasattr(part, "get_input_embeddings")
        table = part.get_input_embeddings() if named else part.embed_tokens
        weight = getattr(table, "weight", None)
        if type(table) is not nn.Embedding or weight is None:
            continue
        if weight.dtype == build.dtype and weight not in tables:
            others = [module for module in users[weight] if type(module) is not nn.Embedding]
            if all(type(module) is nn.Linear for module in others) and len(others) <= 1:
                tables[weight] = BatchedEmbedding(build, *weight.shape)
                heads |= set(others)
    made: dict[nn.Module, nn.Module] = {}
    owners: dict[Tensor, tuple[SharedWeights, str]] = {}
    plain = replace(build, lora=None)
    for path, module in list(whole.named_modules()):
        own = dict(module.named_parameters(recurse=False))
        parent = whole.get_submodule(path.rpartition(".")[0])
        weight = own.get("weight")
        if type(module) is nn.Embedding and weight in tables:
            made[module] = tables[weight]
        elif type(module) is nn.Linear and module in heads and module.weight.dtype == build.dtype:
            size, bias = (module.in_features, module.out_features), module.bias is not None
            made[module] = BatchedHead(build, *size, tables.get(module.weight), bias)
        elif (
            type(module) is nn.Linear
            and module.weight.dtype == build.dtype
            and len(users[module.weight]) == 1
            and not reads_weight(cast(Hashable, type(parent)), path.rpartition(".")[2])
            and "Router" not in type(parent).__name__  # they cast their layers
        ):
            made[module] = linear(module, path, None, plain, parent)
        elif "Sinusoidal" in type(module).__name__ and f"{path}.weight" not in stored and own:
            _compute(whole, module, device)
        else:
            yield from _loose(module, path, own, stored, owners)
    for parent in list(whole.modules()):
        for name, child in list(parent._modules.items()):
            if child in made:
                setattr(parent, name, made[child])


def _loose(
    module: nn.Module,
    path: str,
    own: Mapping[str, Tensor],
    stored: StoredWeights,
    owners: dict[Tensor, tuple[SharedWeights, str]],
) -> Iterator[SharedWeights]:
    """The holder of a module's weights, unless an earlier module has them."""
    known = [name for name, weight in own.items() if weight in owners]
    if not known:
        holder = SharedWeights(module, path, stored)
        owners.update({weight: (holder, name) for name, weight in own.items()})
        if len(holder):
            yield holder
        return
    if len(known) < len(own):
        raise Unsupported(f"uses some weights of {path} twice")
    for name, weight in own.items():
        first, first_name = owners[weight]
        first.share(first_name, module, name)


def _compute(whole: Any, module: nn.Module, device: torch.device) -> None:
    """Compute a module's weights as transformers does where a checkpoint lacks them."""
    for name, weight in module.named_parameters(recurse=False):
        empty = torch.empty(weight.shape, dtype=weight.dtype)
        setattr(module, name, nn.Parameter(empty, requires_grad=False))
    whole._init_weights(module)
    module.to(device)
