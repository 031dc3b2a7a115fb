"""Rotary position embedding (https://arxiv.org/abs/2104.09864) and its context extensions.

The parameters are those of transformers' ``rope_parameters`` (or the older ``rope_scaling``
with ``rope_theta`` beside it):
https://huggingface.co/docs/transformers/main/en/internal/rope_utils
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tgi_cli.errors import ModelError, UnsupportedModelError

TABLE_POSITIONS = 1 << 13
"""Positions whose angles are kept on a CPU, once a step has come so far: 4 MB of bfloat16 for heads
of 128. To compute them takes nine operations a step, 20 us and in a cold cache several times that;
the table for a context of 131072 would take 67 MB."""

WHOLE_TABLE_BYTES = {"cuda": 128 << 20}
"""Most memory of the angles of all positions that are served, which devices of a kind keep where
the host cannot look at positions without waiting. A step then looks them up in two launches."""

_BEYOND = 64
"""Positions of drafts after the last one that is served, at most."""


class RotaryEmbedding(nn.Module):
    """The angles of a step, computed once and used by all layers.

    Args:
        dims: leading dimensions of a head that are rotated.
        parameters: kind of scaling, base and what the kind takes. Of positions on three axes (time,
            height, width; https://arxiv.org/abs/2409.12191) ``mrope_section``, how many frequencies
            each axis has, and ``mrope_interleaved``, whether they alternate.
        max_positions: the model's context.
        dtype: dtype of the results.
        device: device of positions and results.
        served_positions: the context that is served. Default: the model's.

    Raises:
        UnsupportedModelError: a kind of scaling that is not implemented.
        ModelError: a parameter that the kind needs is missing or not a number.
    """

    def __init__(
        self,
        dims: int,
        parameters: Mapping[str, Any],
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        served_positions: int | None = None,
    ) -> None:
        super().__init__()
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind not in _KINDS:
            raise UnsupportedModelError(
                f"rope scaling {kind!r} is not supported for this architecture",
                f"supported: {', '.join(sorted(_KINDS))}",
            )
        try:
            base = float(parameters["rope_theta"])
            if not (math.isfinite(base) and base > 0):
                raise ValueError(f"rope_theta is {base}")
            frequencies = 1.0 / base ** (torch.arange(0, dims, 2).float() / dims)
            frequencies, self.magnitude = _KINDS[kind](
                frequencies,
                base,
                {
                    "original_max_position_embeddings": max_positions,
                    "max_position_embeddings": max_positions,
                    "served_positions": served_positions or max_positions,
                    **parameters,
                },
            )
            if not (math.isfinite(self.magnitude) and bool(frequencies.isfinite().all())):
                raise ValueError("frequencies are not finite")
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise ModelError(
                f"config.json: rope scaling {kind!r} has no usable value: {error!s:.200}"
            ) from error
        self.dtype = dtype
        self.frequencies = frequencies.to(device)
        self._axes: Tensor | None = None
        if parameters.get("mrope_section") is not None:
            self._axes = torch.tensor(2 * _axes(parameters, len(frequencies)), device=device)
        empty = torch.empty(0, dtype=dtype)
        self._table = (empty, empty)
        length = (served_positions or max_positions) + _BEYOND
        most = WHOLE_TABLE_BYTES.get(device.type, 0)
        self._whole = 2 * length * dims * dtype.itemsize <= most
        if self._whole:
            self._table = self._compute(torch.arange(length, device=device))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int64 [T] to cosines and signed sines, [T, 1, dims] each.

        Of a model whose positions have three axes they may be [3, T].
        """
        if positions.ndim == 1:
            return self._angles(positions)
        # A CPU rounds a few cosines otherwise than many: all come from the same table.
        cosines, sines = self._angles(positions.flatten())
        return self._by_axis(cosines), self._by_axis(sines)

    def _by_axis(self, angles: Tensor) -> Tensor:
        """[3 * T, 1, dims], axis after axis, to [T, 1, dims], each number of its own axis."""
        if self._axes is None:
            raise ValueError("positions on three axes for a model whose positions have one")
        of_axes = angles.view(3, -1, *angles.shape[1:])
        return of_axes.gather(0, self._axes.expand(1, *of_axes.shape[1:]))[0]

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._whole:
            return self._look_up(positions)
        kept = TABLE_POSITIONS if positions.device.type == "cpu" and len(positions) else 0
        if not kept or (last := int(positions.max())) >= kept:  # elsewhere the host would wait
            return self._compute(positions)
        if last >= len(self._table[0]):
            length = min(kept, max(256, 1 << last.bit_length()))
            self._table = self._compute(torch.arange(length))
        return self._look_up(positions)

    def _look_up(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = self._table
        return cosines.index_select(0, positions), sines.index_select(0, positions)

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.magnitude != 1.0:
            cos, sin = cos.mul_(self.magnitude), sin.mul_(self.magnitude)
        cosines = torch.cat((cos, cos), dim=-1)[:, None].to(self.dtype)
        return cosines, torch.cat((-sin, sin), dim=-1)[:, None].to(self.dtype)


class Temperature(nn.Module):
    """Factors of queries, 1 + scale * log(1 + floor((position + 1) / period)).

    https://arxiv.org/abs/2501.19399, as Llama 4 has it.
    """

    def __init__(self, scale: float, period: float) -> None:
        super().__init__()
        self.scale, self.period = scale, period

    def forward(self, positions: Tensor) -> Tensor:
        """Positions int64 [T] to float32 [T, 1, 1]."""
        # In float64, since a CPU rounds a few numbers' logarithms otherwise than many's.
        periods = torch.floor((positions.double() + 1.0) / self.period)
        return (torch.log1p(periods) * self.scale + 1.0).float()[:, None, None]


def _axes(parameters: Mapping[str, Any], count: int) -> list[int]:
    """The axis of the position that each of ``count`` frequencies is multiplied by.

    Raises:
        ModelError: sections that do not fit.
    """
    sections = parameters["mrope_section"]
    sized = isinstance(sections, list | tuple) and len(sections) >= 3
    if not sized or not all(type(size) is int and size >= 0 for size in sections):
        raise ModelError(f"config.json: 'mrope_section' is {sections!s:.60}, not three sizes")
    if parameters.get("mrope_interleaved"):
        # Height and width have every third frequency until they have all of theirs.
        return [n % 3 if n < 3 * sections[n % 3] else 0 for n in range(count)]
    if sum(sections) != count:
        raise ModelError(f"config.json: 'mrope_section' {sections!s:.60} is not of {count} in all")
    return [part % 3 for part, size in enumerate(sections) for _ in range(size)]


_Scaled = tuple[Tensor, float]
"""Frequencies [head_dim / 2] float32, and a factor for cosines and sines."""


def _default(frequencies: Tensor, base: float, parameters: Mapping[str, Any]) -> _Scaled:
    return frequencies, 1.0


def _dynamic(frequencies: Tensor, base: float, parameters: Mapping[str, Any]) -> _Scaled:
    """NTK-aware (https://arxiv.org/abs/2309.00071, appendix A.1): a base that grows with the text.

    It grows beyond the original context only, and with the served context, not with each text: its
    first tokens are cached before its length is known.
    """
    original = float(parameters["original_max_position_embeddings"])
    served, dims = float(parameters["served_positions"]), 2 * len(frequencies)
    if served <= original or dims <= 2:
        return frequencies, 1.0
    factor = float(parameters["factor"])
    grown = base * (factor * served / original - (factor - 1)) ** (dims / (dims - 2))
    return 1.0 / grown ** (torch.arange(0, dims, 2).float() / dims), 1.0


def _linear(frequencies: Tensor, base: float, parameters: Mapping[str, Any]) -> _Scaled:
    """Position interpolation (https://arxiv.org/abs/2306.15595)."""
    return frequencies / float(parameters["factor"]), 1.0


def _proportional(frequencies: Tensor, base: float, parameters: Mapping[str, Any]) -> _Scaled:
    """Rotate only the shortest wavelengths, over all of a head's pairs (LFM 3, Gemma 4)."""
    dims = 2 * len(frequencies)
    rotated = int(float(parameters.get("partial_rotary_factor", 1.0)) * dims // 2)
    frequencies = frequencies / float(parameters.get("factor", 1.0))
    frequencies[rotated:] = 0.0
    return frequencies, 1.0


def _llama3(frequencies: Tensor, base: float, parameters: Mapping[str, Any]) -> _Scaled:
    """Llama 3.1: long wavelengths are interpolated, short ones unchanged, those between blended."""
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    context = float(parameters["original_max_position_embeddings"])
    turns = context * frequencies / (2 * math.pi)  # in the original context
    keep = ((turns - low) / (high - low)).clamp_(0.0, 1.0)
    return torch.lerp(frequencies / factor, frequencies, keep), 1.0


def _yarn(frequencies: Tensor, base: float, parameters: Mapping[str, Any]) -> _Scaled:
    """YaRN (https://arxiv.org/abs/2309.00071)."""
    factor = float(parameters["factor"])
    context = float(parameters["original_max_position_embeddings"])
    dims = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        """Where the frequencies make that many turns in the original context."""
        return dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(float(parameters.get("beta_fast") or 32))
    high = dimension(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low if high != low else 0.001
    interpolate = ((torch.arange(dims // 2, dtype=torch.float32) - low) / width).clamp_(0.0, 1.0)
    return torch.lerp(frequencies, frequencies / factor, interpolate), yarn_magnitude(
        factor, parameters
    )


def yarn_magnitude(factor: float, parameters: Mapping[str, Any]) -> float:
    """What YaRN multiplies cosines and sines by; its own choice without ``parameters``."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(float(over)) / magnitude(float(under)) if over and under else magnitude(1.0)


def _longrope(frequencies: Tensor, base: float, parameters: Mapping[str, Any]) -> _Scaled:
    """LongRoPE (https://arxiv.org/abs/2402.13753): a factor per frequency.

    There is a set for texts within the original context and one for longer ones. The served
    context chooses, since a text's early tokens are cached before its length is known: up to the
    original context the short set is used.
    """
    original = float(parameters["original_max_position_embeddings"])
    long = float(parameters["served_positions"]) > original
    factors = torch.tensor(parameters["long_factor" if long else "short_factor"])
    if factors.shape != frequencies.shape:
        raise ValueError(f"{len(factors)} factors for {len(frequencies)} frequencies")
    scale = parameters.get("factor")
    if scale is None:
        scale = float(parameters["max_position_embeddings"]) / original
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
    return frequencies / factors.float(), float(magnitude)


_KINDS: dict[str, Callable[[Tensor, float, Mapping[str, Any]], _Scaled]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "mrope": _default,
    "proportional": _proportional,
    "su": _longrope,
    "yarn": _yarn,
}
