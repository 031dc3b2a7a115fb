"""Distributions of arrival times and of lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

import msgspec

from tgi_cli.bench.events import BenchRequest
from tgi_cli.errors import ConfigError

_ARRIVAL_FORMS = "constant, poisson, gamma:BURSTINESS or ramp:FROM,TO,SECONDS"


@dataclass(frozen=True)
class ArrivalProcess:
    """An arrival process.

    Attributes:
        kind: ``constant``, ``poisson``, ``gamma`` or ``ramp``.
        burstiness: the shape of gamma's gaps: 1 is Poisson, less comes in bursts, more is more
            even (as vLLM's benchmark has it).
        first, last, seconds: a ramp's rates per second and how long it climbs; it stays at the
            last. Between, it is a Poisson process of that changing rate.
    """

    kind: str = "poisson"
    burstiness: float = 1.0
    first: float = 0.0
    last: float = 0.0
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> ArrivalProcess:
        """Parse ``constant``, ``poisson``, ``gamma:0.5`` or ``ramp:1,16,60``.

        Raises:
            ConfigError: Invalid form or numbers.
        """
        kind, _, rest = text.strip().partition(":")
        try:
            numbers = [float(part) for part in rest.split(",")] if rest else []
        except ValueError:
            numbers = [math.nan]
        match kind, numbers:
            case (("constant" | "poisson"), []):
                return cls(kind)
            case "gamma", [burstiness] if 0 < burstiness < math.inf:
                return cls("gamma", burstiness)
            case "ramp", [first, last, seconds] if (
                first >= 0 and 0 < last < math.inf and 0 < seconds < math.inf
            ):
                return cls("ramp", first=first, last=last, seconds=seconds)
        raise ConfigError(f"{text!r} is not a process of arrivals", f"write {_ARRIVAL_FORMS}")

    def times(self, rate: float, seed: int) -> Iterator[float]:
        """Yield ascending seconds from the start without end, ``rate`` per second on average.

        A ramp has its own rates. Constant arrivals begin at 0, others with their first gap.

        Raises:
            ConfigError: The rate is not above 0.
        """
        if self.kind != "ramp" and not 0 < rate < math.inf:
            raise ConfigError(f"{rate:g} requests per second is not a rate", "give one above 0")
        return self._times(rate, Random(f"arrivals {seed}"))

    def _times(self, rate: float, rng: Random) -> Iterator[float]:
        now, events = 0.0, 0.0
        while True:
            if self.kind == "constant":
                yield events / rate
                events += 1
            elif self.kind == "ramp":
                events += rng.expovariate(1.0)
                yield self._ramped(events)
            else:
                now += rng.gammavariate(self.burstiness, 1 / (rate * self.burstiness))
                yield now

    def _ramped(self, events: float) -> float:
        """When so many events are expected: the inverse of the integral of the rate."""
        climb = (self.last - self.first) / self.seconds
        whole = (self.first + self.last) / 2 * self.seconds
        if events >= whole:
            return self.seconds + (events - whole) / self.last
        if abs(climb) < 1e-12:
            return events / self.first
        return (math.sqrt(self.first**2 + 2 * climb * events) - self.first) / climb

    def __str__(self) -> str:
        if self.kind == "gamma":
            return f"gamma:{self.burstiness:g}"
        if self.kind == "ramp":
            return f"ramp:{self.first:g},{self.last:g},{self.seconds:g}"
        return self.kind


def scheduled(requests: Iterable[BenchRequest], times: Iterable[float]) -> Iterator[BenchRequest]:
    """Schedule each request at the next of the times.

    Of a conversation only the first turn is scheduled; the others follow the responses.
    """
    clock = iter(times)
    begun: set[int] = set()
    for request in requests:
        if request.conversation is not None:
            if request.conversation in begun:
                yield request
                continue
            begun.add(request.conversation)
        at = next(clock, None)
        if at is None:
            return
        yield msgspec.structs.replace(request, at=at)


_ATTEMPTS = 100
"""Draws outside the bounds after which the nearest bound is taken."""

_LENGTH_FORMS = "128, uniform:64,256, normal:512,128 or lognormal:512,128 (both also with ,MIN,MAX)"


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of whole numbers from ``low`` to ``high``.

    Attributes:
        kind: ``fixed``, ``uniform``, ``normal`` or ``lognormal``.
        mean, deviation: Those of the unbounded distribution; for ``lognormal`` of the values, not
            of their logarithms.
    """

    kind: str
    mean: float
    deviation: float = 0.0
    low: int = 1
    high: int = 1 << 20

    @classmethod
    def fixed(cls, length: int) -> LengthDistribution:
        """The constant ``length``."""
        return cls("fixed", float(length), low=length, high=length)

    @classmethod
    def parse(cls, text: str) -> LengthDistribution:
        """Parse ``128``, ``uniform:64,256``, ``normal:512,128`` or ``lognormal:512,128,1,4096``.

        The numbers are the bounds of a uniform distribution, and the mean and the standard
        deviation of the others, which bounds may follow.

        Raises:
            ConfigError: Invalid form or numbers.
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
        raise ConfigError(f"{text!r} is not a distribution of lengths", f"write {_LENGTH_FORMS}")

    def draw(self, rng: Random) -> int:
        """Draw a length."""
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            return rng.randint(self.low, self.high)
        value = self.mean
        for _ in range(_ATTEMPTS):
            value = self._value(rng)
            if self.low <= round(value) <= self.high:
                break
        return min(max(round(value), self.low), self.high)

    def _value(self, rng: Random) -> float:
        if self.kind == "normal":
            return rng.gauss(self.mean, self.deviation)
        variance = math.log1p((self.deviation / self.mean) ** 2)
        return rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))

    def __str__(self) -> str:
        if self.kind == "fixed":
            return str(self.low)
        if self.kind == "uniform":
            return f"uniform:{self.low},{self.high}"
        bounds = "" if (self.low, self.high) == (1, 1 << 20) else f",{self.low},{self.high}"
        return f"{self.kind}:{self.mean:g},{self.deviation:g}{bounds}"
