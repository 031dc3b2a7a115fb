"""What a quantized checkpoint's format has to tell, so that it reads like one of plain weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from tgi_cli.errors import CheckpointError
from tgi_cli.quantization.quantized_weight import QuantizedWeight


class TensorHeader(Protocol):
    """What the header of a safetensors file says of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """As safetensors names it: ``I32``, ``F8_E4M3``."""


H = TypeVar("H", bound=TensorHeader)

ReadTensor = Callable[[str], Tensor]
"""From a suffix to the module's tensor of that name."""


@dataclass(frozen=True, slots=True)
class MergedWeight:
    """A module's weight, made of several stored tensors.

    Attributes:
        shape: of the weight, [out, in].
        names: suffixes of the tensors that ``read`` takes, in that order.
        read: makes the weight of them.
        about: how it is kept, in a few words (``4 bits, groups of 128``).
    """

    shape: tuple[int, int]
    names: tuple[str, ...]
    read: Callable[..., QuantizedWeight]
    about: str = field(default="", compare=False)


class CheckpointFormat(ABC):
    """How one format spreads a module's weight over tensors of other names.

    To whoever loads it, a checkpoint has for every quantized module M a tensor ``M.weight``, and
    none of those that it is made of. Modules of which only a plain weight is there are not
    quantized, whatever the configuration says.
    """

    name: str
    """As ``--quantize`` has it."""
    code_suffixes: tuple[str, ...]
    """Suffixes of the tensor with the codes; a module has one of them."""
    required_suffixes: tuple[str, ...]
    """Of these at least one stands beside it, or it is a plain weight."""
    optional_suffixes: tuple[str, ...] = ()
    """What else may stand beside it; what ``merge`` does not name is not used."""
    ignored: tuple[str, ...] = ()
    """Regular expressions for names of other tensors that come with the format, in vain here."""

    @abstractmethod
    def merge(
        self, module: str, tensors: Mapping[str, TensorHeader], peek: ReadTensor
    ) -> MergedWeight:
        """The weight of a module, given its tensors by their suffixes.

        ``peek`` reads one of them, which should be small.

        Raises:
            CheckpointError: they do not go together.
            UnsupportedModelError: they are of a kind that cannot be read.
        """

    def modules(self, stored: Mapping[str, H]) -> dict[str, dict[str, H]]:
        """The quantized modules of a checkpoint, with their tensors by suffixes."""
        found: dict[str, dict[str, H]] = {}
        for name in stored:
            main = next((each for each in self.code_suffixes if name.endswith(f".{each}")), None)
            if main is None:
                continue
            module = name.removesuffix(f".{main}")
            beside = {
                suffix: stored[f"{module}.{suffix}"]
                for suffix in (*self.required_suffixes, *self.optional_suffixes)
                if f"{module}.{suffix}" in stored
            }
            if not beside.keys().isdisjoint(self.required_suffixes):
                found[module] = {main: stored[name], **beside}
        return found

    def plain_names(self, names: Iterable[str]) -> list[str]:
        """The names that the checkpoint has for whoever loads it."""
        plain = dict.fromkeys(names)
        headers = {name: _Nothing() for name in plain}
        for module, tensors in self.modules(headers).items():
            for suffix in tensors:
                del plain[f"{module}.{suffix}"]
            plain[f"{module}.weight"] = None
        return list(plain)


@dataclass(frozen=True, slots=True)
class _Nothing:
    shape: tuple[int, ...] = ()
    dtype: str = ""


def check_tensors(
    right: bool, format_name: str, module: str, tensors: Mapping[str, TensorHeader]
) -> None:
    """Raise CheckpointError, with the shapes, unless they are ``right``."""
    if right:
        return
    shapes = ", ".join(
        f"{suffix} {each.dtype} {list(each.shape)}" for suffix, each in tensors.items()
    )
    raise CheckpointError(
        f"{module} is no weight quantized with {format_name}: its tensors are {shapes}",
        "download the model again, or correct its quantization_config",
    )
