"""How long prompts and answers are: numbers of tokens, drawn from a distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from tgi_cli.errors import ConfigError

_ATTEMPTS = 100
"""Draws outside the bounds, before the nearest bound is taken."""

_FORMS = "128, uniform:64,256, normal:512,128 or lognormal:512,128 (both also with ,MIN,MAX)"


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers from ``low`` up to ``high``.

    Attributes:
        kind: ``fixed``, ``uniform``, ``normal`` or ``lognormal``.
        mean, deviation: of the distribution itself, before it is bounded; also of ``lognormal``,
            whose logarithms have others.
    """

    kind: str
    mean: float
    deviation: float = 0.0
    low: int = 1
    high: int = 1 << 20

    @classmethod
    def fixed(cls, length: int) -> Lengths:
        """Always ``length``."""
        return cls("fixed", float(length), low=length, high=length)

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Of ``128``, ``uniform:64,256``, ``normal:512,128`` or ``lognormal:512,128,1,4096``.

        The numbers are the bounds of a uniform distribution, and the mean and the standard
        deviation of the others, which bounds may follow.

        Raises:
            ConfigError: another form, or numbers that make no distribution.
        """
        kind, colon, rest = text.strip().partition(":")
        if not colon:
            kind, rest = "fixed", kind
        try:
            numbers = [float(part) for part in rest.split(",")]
        except ValueError:
            numbers = []
        if not all(math.isfinite(number) for number in numbers):
            numbers = []
        match kind, numbers:
            case "fixed", [length] if length >= 1 and length == int(length):
                return cls.fixed(int(length))
            case "uniform", [low, high] if 1 <= low <= high:
                bounds = int(low), int(high)
                return cls("uniform", sum(bounds) / 2, (high - low) / math.sqrt(12), *bounds)
            case (("normal" | "lognormal"), [mean, deviation]) if mean >= 1 and deviation >= 0:
                return cls(kind, mean, deviation)
            case (("normal" | "lognormal"), [mean, deviation, low, high]) if (
                mean >= 1 and deviation >= 0 and 1 <= low <= high
            ):
                return cls(kind, mean, deviation, int(low), int(high))
        raise ConfigError(f"{text!r} says no lengths", f"write {_FORMS}")

    def draw(self, dice: Random) -> int:
        """One length."""
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            return dice.randint(self.low, self.high)
        value = self.mean
        for _ in range(_ATTEMPTS):
            value = self._value(dice)
            if self.low <= round(value) <= self.high:
                break
        return min(max(round(value), self.low), self.high)

    def _value(self, dice: Random) -> float:
        if self.kind == "normal":
            return dice.gauss(self.mean, self.deviation)
        variance = math.log1p((self.deviation / self.mean) ** 2)
        return dice.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))

    def __str__(self) -> str:
        if self.kind == "fixed":
            return str(self.low)
        if self.kind == "uniform":
            return f"uniform:{self.low},{self.high}"
        bounds = "" if (self.low, self.high) == (1, 1 << 20) else f",{self.low},{self.high}"
        return f"{self.kind}:{self.mean:g},{self.deviation:g}{bounds}"
