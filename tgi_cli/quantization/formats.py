"""Interface of checkpoint formats: quantized modules presented as plain weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from tgi_cli.errors import CheckpointError
from tgi_cli.quantization.quantized_weight import QuantizedWeight


class TensorHeader(Protocol):
    """A tensor's entry in the header of a safetensors file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """safetensors' name, such as ``I32`` or ``F8_E4M3``."""


T = TypeVar("T")

ModuleTensors = Mapping[str, TensorHeader]
"""Entries of a module's tensors by suffix."""

ReadTensor = Callable[[str], Tensor]
"""Reads the module's tensor with a suffix."""


@dataclass(frozen=True, slots=True)
class MergedWeight:
    """A module's weight that consists of several stored tensors.

    Attributes:
        shape: shape of the weight, [out, in].
        names: suffixes of the arguments of ``read``, in order.
        read: builds the weight from the tensors.
        about: description of the format (``4 bits, groups of 128``).
    """

    shape: tuple[int, int]
    names: tuple[str, ...]
    read: Callable[..., QuantizedWeight]
    about: str = field(default="", compare=False)


class CheckpointFormat(ABC):
    """How one format stores a module's weight as several tensors.

    A loader sees one tensor ``M.weight`` for each quantized module M, instead of the tensors that
    it consists of. Modules with only a plain weight are not quantized, whatever the config states.

    Attributes:
        name: the format's name in ``--quantize``.
        code_suffixes: suffixes of the tensor with the codes, of which a module has one.
        required_suffixes: suffixes of which a quantized module has at least one.
        optional_suffixes: further suffixes; tensors that ``merge`` does not name are unused.
        ignored: regular expressions for names of the format's tensors that are unused here.
        has_integers: whether weights are in integers of 8 bits or fewer, or some are.
    """

    name: str
    code_suffixes: tuple[str, ...]
    required_suffixes: tuple[str, ...]
    optional_suffixes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    has_integers: bool = False

    @abstractmethod
    def merge(self, module: str, tensors: ModuleTensors, peek: ReadTensor) -> MergedWeight:
        """Describe the weight of a module, given its tensors by suffix.

        ``peek`` reads a tensor, which should be small.

        Raises:
            CheckpointError: the tensors contradict each other.
            UnsupportedModelError: this variant of the format is not supported.
        """

    def modules(self, stored: Mapping[str, T]) -> dict[str, dict[str, T]]:
        """The quantized modules of a checkpoint, with their tensors by suffix."""
        found: dict[str, dict[str, T]] = {}
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
        """The names of tensors that a loader sees."""
        plain = dict.fromkeys(names)
        for module, tensors in self.modules(dict(plain)).items():
            for suffix in tensors:
                del plain[f"{module}.{suffix}"]
            plain[f"{module}.weight"] = None
        return list(plain)

    def check(self, module: str, tensors: ModuleTensors, valid: bool) -> None:
        """Raise CheckpointError, with the shapes, unless a module's tensors are ``valid``."""
        if valid:
            return
        shapes = ", ".join(
            f"{suffix} {each.dtype} {list(each.shape)}" for suffix, each in tensors.items()
        )
        raise CheckpointError(
            f"{module} is not a valid {self.name} weight: its tensors are {shapes}",
            "download the model again, or correct its quantization_config",
        )


def are_matrices(tensors: ModuleTensors, names: Iterable[str]) -> bool:
    """Whether all of these tensors exist and are matrices."""
    return all(name in tensors and len(tensors[name].shape) == 2 for name in names)
