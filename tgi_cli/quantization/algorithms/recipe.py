"""Recipes for quantization, their validation, and the result for one linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from tgi_cli.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How weights are quantized; :func:`check_recipe` validates it.

    Attributes:
        method: ``gptq``, ``awq``, ``rtn``, ``fp8`` or ``int8``.
        bits: 2, 3, 4 or 8.
        group_size: inputs that share a scale, or -1 for whole rows. fp8 and int8 have a scale per
            row (-1), or fp8 one per tensor (0).
        sym: symmetric grid, with the zero in the middle of the codes.
        desc_act: GPTQ processes inputs in order of descending Hessian diagonal (act-order).
        static_groups: find all scales before any column is changed, so that groups stay
            contiguous with ``desc_act``.
        group_aware: group-aware reordering, only within and among whole groups, which costs
            nothing in serving. Not with ``desc_act``.
        mse: search scales with the least squared error instead of covering the extremes.
        percdamp: share of the Hessian's mean diagonal that is added to the diagonal.
        format: ``gptq``, ``gptq_v2``, ``awq`` or ``compressed-tensors``.
        scale_dtype: dtype of stored scales, to which they are rounded before codes are chosen:
            float16 for gptq and awq, the model's dtype for compressed-tensors.
    """

    method: str
    bits: int = 4
    group_size: int = 128
    sym: bool = True
    desc_act: bool = False
    static_groups: bool = False
    group_aware: bool = True
    mse: bool = False
    percdamp: float = 0.01
    format: str = "gptq"
    scale_dtype: torch.dtype = torch.float16

    def group(self, inputs: int) -> int:
        """Number of inputs that share a scale, for a weight's number of inputs."""
        return self.group_size if self.group_size > 0 else inputs


@dataclass(frozen=True, slots=True, eq=False)
class QuantizationResult:
    """A linear layer's weights [N, K] as codes on a grid: ``(codes - zeros[g]) * scales[g]``.

    Attributes:
        codes: [N, K] uint8, from 0 to 2^bits - 1; fp8: [N, K] float8_e4m3fn instead.
        scales: [G, N] float32; G groups in the order of ``groups``.
        zeros: [G, N] int32, or None for fp8 and int8, whose grids are symmetric; signed codes are
            stored with 2^(bits-1) added.
        groups: [K] int32, the group of each input (``g_idx``).
        loss: mean squared error of the outputs on the calibration inputs, relative to their mean
            square; NaN without inputs.
        note: deviation from the recipe, with the reason; mostly empty.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups: torch.Tensor
    loss: float
    note: str = ""


METHODS = ("gptq", "awq", "rtn", "fp8", "int8")
FORMATS = ("gptq", "gptq_v2", "awq", "compressed-tensors")
WIDTHS = (2, 3, 4, 8)

_BYTES = ("fp8", "int8")
"""Methods with a byte per element and a scale per row."""


def check_recipe(recipe: Recipe) -> None:
    """Raise ConfigError, with a remedy, for an invalid recipe."""
    for name, value, known in (
        ("method", recipe.method, METHODS),
        ("format", recipe.format, FORMATS),
        ("bits", recipe.bits, WIDTHS),
    ):
        if value not in known:
            choices = ", ".join(str(each) for each in known)
            raise ConfigError(f"--{name} {value} is unknown", f"choose one of {choices}")
    if not 0 < recipe.percdamp < 1:
        raise ConfigError(f"--percdamp {recipe.percdamp} is not between 0 and 1", "try 0.01")
    if recipe.method in _BYTES:
        _check_bytes(recipe)
    else:
        _check_integers(recipe)


def _check_bytes(recipe: Recipe) -> None:
    method = recipe.method
    _refuse_if(
        recipe.format != "compressed-tensors",
        f"{method} weights cannot be written in the format {recipe.format}",
        "use --format compressed-tensors",
    )
    _refuse_if(recipe.bits != 8, f"{method} has 8 bits, not {recipe.bits}", "leave out --bits")
    _refuse_if(not recipe.sym, f"{method} has no zeros", "leave out --asym")
    _refuse_if(recipe.mse, f"{method} has no scales to search", "leave out --mse")
    _refuse_if(
        recipe.group_size not in ((-1, 0) if method == "fp8" else (-1,)),
        f"{method} has a scale per row, not per group of {recipe.group_size}",
        "leave out --groupsize",
    )
    _check_order(recipe)


def _check_integers(recipe: Recipe) -> None:
    size = recipe.group_size
    _refuse_if(
        size != -1 and (size < 8 or size % 8 != 0),
        f"--groupsize {size} is neither -1 nor a multiple of 8",
        "32, 64 and 128 are common",
    )
    _check_order(recipe)
    layout = recipe.format
    if layout in ("awq", "compressed-tensors"):
        _refuse_if(
            recipe.desc_act and not recipe.static_groups,
            f"the format {layout} does not store the groups of inputs, which act-order needs",
            "add --static-groups, or use --format gptq",
        )
    if layout == "awq":
        _refuse_if(recipe.bits != 4, f"awq's layout has 4 bits, not {recipe.bits}", "use --bits 4")
    if layout == "compressed-tensors":
        _refuse_if(
            recipe.bits == 3,
            "versions of compressed-tensors disagree on how numbers of 3 bits are packed",
            "use --format gptq, or other --bits",
        )
    elif recipe.scale_dtype != torch.float16:
        raise ConfigError(f"the format {layout} has scales in float16, not {recipe.scale_dtype}")
    _refuse_if(
        recipe.mse and recipe.method == "awq",
        "awq searches what to clip by itself",
        "leave out --mse",
    )


def _check_order(recipe: Recipe) -> None:
    if recipe.method == "gptq":
        _refuse_if(
            recipe.desc_act and recipe.group_aware,
            "inputs can be reordered across groups (act-order) or within (group-aware), not both",
            "choose one of --act-order and --group-aware",
        )
        return
    for given, flag in ((recipe.desc_act, "act-order"), (recipe.static_groups, "static-groups")):
        _refuse_if(given, f"--{flag} is for gptq, not {recipe.method}", f"leave out --{flag}")


def _refuse_if(wrong: bool, cause: str, remedy: str) -> None:
    if wrong:
        raise ConfigError(cause, remedy)


def default_format(method: str, sym: bool = True) -> str:
    """The default format of a method.

    ``compressed-tensors`` for fp8 and int8, ``awq`` for awq, ``gptq`` for symmetric gptq and rtn,
    else ``gptq_v2``, as gptqmodel distrusts other programs' zeros in ``gptq``.
    """
    if method in _BYTES:
        return "compressed-tensors"
    if method == "awq":
        return "awq"
    return "gptq" if sym else "gptq_v2"


def incompatibility(recipe: Recipe, outputs: int, inputs: int) -> str | None:
    """The reason why the format cannot represent a weight [outputs, inputs], or None.

    Such a layer is not quantized, and is listed as ``ignored``.
    """
    if recipe.method in _BYTES:
        return None
    size = recipe.group_size
    whole = size == -1 or inputs % size == 0
    if recipe.format in ("gptq", "gptq_v2"):
        # Words are full in both directions: of codes along inputs, of zeros along outputs.
        unit = 32 // gcd(32, recipe.bits)
        for count, what in ((inputs, "inputs"), (outputs, "outputs")):
            if count % unit:
                return f"its {count} {what} are not a multiple of {unit}"
        return None
    if not whole:
        return f"its {inputs} inputs are not a multiple of groups of {size}"
    if recipe.format == "awq" and outputs % 8:
        return f"its {outputs} outputs are not a multiple of 8"
    return None


def describe_recipe(recipe: Recipe) -> str:
    """Describe a recipe for people: ``gptq, 4 bits, groups of 128, symmetric, act-order``."""
    if recipe.method in _BYTES:
        share = "one scale a tensor" if recipe.group_size == 0 else "one scale a row"
        return f"{recipe.method}, {share}"
    size = recipe.group_size
    words = [
        recipe.method,
        f"{recipe.bits} bits",
        "one scale a row" if size == -1 else f"groups of {size}",
        "symmetric" if recipe.sym else "with zeros",
    ]
    if recipe.method == "gptq":
        words += ["act-order"] * recipe.desc_act + ["group-aware"] * recipe.group_aware
        words += ["static groups"] * recipe.static_groups
    words += ["scales by least squares"] * recipe.mse
    return ", ".join(words)
