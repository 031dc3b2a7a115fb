"""Towers of transformers' models: their own modules from pixels to the decoder's vectors.

``get_image_features`` of a model encodes images and fits the result to its decoder. It runs here
as it is, on the modules that it needs, with our linear layers. The decoder is left out.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tgi_cli.device.distributed import ALONE
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.layers import Build, Loadable
from tgi_cli.models.base import VISION
from tgi_cli.models.config import ModelConfig, shown_error
from tgi_cli.models.hf.buffers import fill_buffers
from tgi_cli.models.hf.float32_products import float32_products
from tgi_cli.models.hf.largest_image import TILES, largest_image
from tgi_cli.models.hf.layers import UnreplacedWeights, linear
from tgi_cli.models.hf.masks import Unsupported
from tgi_cli.models.hf.names import sources, stored_names
from tgi_cli.models.hf.products import reads_weight
from tgi_cli.models.hf.skeleton import class_and_config, empty_model
from tgi_cli.models.hf.tower_attention import replace_attention
from tgi_cli.models.hf.tower_layers import encode_tiles_alone, replace_operations
from tgi_cli.models.hf.tower_pieces import add_pauses
from tgi_cli.models.vision import ImageFeatures, VisionTower
from tgi_cli.models.weight_map import Source
from tgi_cli.quantization import Unquantized

_OTHERS = re.compile(r"audio|speech|sound|talker|code2wav|vqmodel|generation_")
"""In names of parts that images do not need: of sound, of speech, and of making images (Janus)."""


class TransformersTower(VisionTower):
    """The tower and the projector of a model that transformers has.

    Args:
        config: configuration of a checkpoint whose architecture takes images.
        build: dtype and context; a tower is whole on every shard, never quantized as it is
            loaded, and no target of adapters.
        device: where the weights go.

    Raises:
        UnsupportedModelError: it cannot be built; the message has the reason.
    """

    def __init__(self, config: ModelConfig, build: Build, device: torch.device) -> None:
        super().__init__()
        build = replace(build, quantization=Unquantized(), shard=ALONE, lora=None, head=None)
        with _refusals(config):
            known, own, _ = class_and_config(config)
            whole = empty_model(known, own, build.dtype)
            weights = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
            found = sources(whole, weights, stored_names(config))
            core, path = _core(whole)
            _leave_out_text(whole, core)
            _require_libraries(core)
            prefix = f"{path}." if path else ""
            self._sources = {
                name.removeprefix(prefix): source
                for name, source in found.items()
                if name.startswith(prefix)
            }
            self._prefix = prefix
            fill_buffers(core, None, build, device, self._sources)
            _keep_single_rows(core)
            replace_attention(core)
            self._tiles_alone = False
            if device.type == "cpu":
                replace_operations(core, build)
                self._tiles_alone = encode_tiles_alone(core)
            self.loose = nn.ModuleList(_replace_linears(core, build, self._sources))
            if device.type == "cpu":
                add_pauses(core, self.pauses)
        self.core = core
        self._dtype, self._device = build.dtype, device
        self._named = _arguments(core)
        self.eval()

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(_blocks(self.core))

    @property
    def parts(self) -> int:
        return len(self.layers) * (TILES if self._tiles_alone else 1)

    def calls(self, tensors: Mapping[str, Tensor]) -> int:
        pixels = tensors.get("pixel_values") if self._tiles_alone else None
        return len(self.layers) * max(1, 1 if pixels is None else prod(pixels.shape[:-3]))

    def source(self, name: str) -> Source:
        name = name.removeprefix(_CORE)
        return self._sources.get(name) or Source((self._prefix + name,))

    @torch.inference_mode()
    def encode(self, tensors: Mapping[str, Tensor], num_rows: int | None) -> ImageFeatures:
        try:
            with float32_products(self._dtype, self._device):
                output = self.core.get_image_features(**self._given(tensors), return_dict=True)
            rows = _flat(getattr(output, "pooler_output", output))
            deepstack = tuple(map(_flat, getattr(output, "deepstack_features", None) or ()))
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
            raise ValueError(f"the image cannot be encoded ({shown_error(error)})") from error
        wanted = len(rows) if num_rows is None else num_rows
        if any(len(each) != wanted for each in (rows, *deepstack)):
            raise ValueError(f"an image of {wanted} tokens has {len(rows)} rows")
        return ImageFeatures(rows, deepstack)

    def largest(self, max_rows: int) -> dict[str, Tensor]:
        return largest_image(self.core.config, self._named, max_rows)

    def _given(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The arguments of the model's own method."""
        foreign = tensors.keys() - self._named.keys()
        missing = [name for name, needed in self._named.items() if needed and name not in tensors]
        if foreign or missing:
            raise ValueError(f"unknown: {sorted(foreign)}; missing: {missing}")
        return {
            name: each.to(self._device, self._dtype if each.is_floating_point() else each.dtype)
            for name, each in tensors.items()
        }


_CORE = "core."
"""What the names of the tower's modules begin with, within it."""


@contextmanager
def _refusals(config: ModelConfig) -> Iterator[None]:
    """Raise UnsupportedModelError, naming the architecture, for errors of the model's code."""
    cannot = f"images cannot be encoded through transformers for {config.architecture}"
    try:
        yield
    except UnsupportedModelError:
        raise
    except Unsupported as reason:
        raise UnsupportedModelError(f"{cannot}: it {reason}") from reason
    except Exception as error:  # the model's code may raise anything
        raise UnsupportedModelError(f"{cannot}: {shown_error(error)}") from error


def _core(whole: Any) -> tuple[Any, str]:
    """The part of a model that encodes images, and its path: the model without its head."""
    inner = getattr(whole, "model", whole.base_model)
    if inner is not whole and hasattr(inner, "get_image_features"):
        return inner, next(path for path, each in whole.named_modules() if each is inner)
    if hasattr(whole, "get_image_features"):
        return whole, ""
    raise Unsupported("has no method that encodes images")


def _leave_out_text(whole: Any, core: Any) -> None:
    """Remove decoder, head, and the parts that images do not need."""
    decoder, head = whole.get_decoder(), whole.get_output_embeddings()
    if decoder is core or decoder is whole:
        raise Unsupported("has no decoder of its own beside the tower")
    # From above downwards, so that nothing is looked at within what is removed.
    for path, module in list(core.named_modules()):
        parent, _, name = path.rpartition(".")
        if not path or not _has(core, path):
            continue
        if module in (decoder, head) or (not parent and _OTHERS.search(name)):
            delattr(core.get_submodule(parent), name)


def _keep_single_rows(core: nn.Module) -> None:
    """Let Mistral 3 encode images of one row: it drops the first dimension of its rows, if 1."""
    for module in core.modules():
        if type(module).__name__ == "Mistral3MultiModalProjector":
            module.register_forward_hook(lambda _module, _inputs, rows: rows[None])


def _require_libraries(core: nn.Module) -> None:
    """Refuse what :func:`~tgi_cli.models.hf.towers.towers_without_libraries` left empty."""
    for module in core.modules():
        if isinstance(module, PreTrainedModel) and next(module.children(), None) is None:
            raise Unsupported(
                f"needs a package that is not installed, for its {type(module).__name__}"
            )


def _has(core: nn.Module, path: str) -> bool:
    try:
        core.get_submodule(path)
    except AttributeError:
        return False
    return True


def _replace_linears(
    core: nn.Module, build: Build, stored: Container[str]
) -> Iterator[UnreplacedWeights]:
    """Put our linear layers into a tower; yields the holders of its other weights."""
    at = f"{VISION}{_CORE}"
    names = _Prefixed(stored, at)
    for path, module in list(core.named_modules()):
        if isinstance(module, Loadable):
            continue
        parent_path, _, name = path.rpartition(".")
        parent = core.get_submodule(parent_path)
        plain = type(module) is nn.Linear and module.weight.dtype == build.dtype
        if plain and not reads_weight(cast(Hashable, type(parent)), name):
            new = linear(cast(nn.Linear, module), path, None, build, parent)
            setattr(parent, name, new)
            continue
        loose = UnreplacedWeights(module, f"{at}{path}".removesuffix("."), names, {})
        if len(loose):
            yield loose


class _Prefixed:
    """Names within a tower, looked up by their names within the model."""

    def __init__(self, names: Container[str], prefix: str) -> None:
        self._names = names
        self._prefix = prefix

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.removeprefix(self._prefix) in self._names


def _arguments(core: Any) -> dict[str, bool]:
    """What an image's encoder takes beside options, and whether it needs it."""
    parameters = inspect.signature(inspect.unwrap(type(core).get_image_features)).parameters
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: each.default is inspect.Parameter.empty
        for name, each in parameters.items()
        if each.kind in plain and name != "self"
    }


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules, which transformers' encoders loop over."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)


def _flat(features: Any) -> Tensor:
    """Features as [N, hidden], of a tensor of any dimensions or a sequence of them."""
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([_flat(each) for each in features])
