"""When requests come: constant, Poisson, gamma (in bursts), or at a rate that climbs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

import msgspec

from tgi_cli.bench.events import Request
from tgi_cli.errors import ConfigError

_FORMS = "constant, poisson, gamma:BURSTINESS or ramp:FROM,TO,SECONDS"


@dataclass(frozen=True)
class Arrivals:
    """A process that says when the next request comes.

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
    def parse(cls, text: str) -> Arrivals:
        """Of ``constant``, ``poisson``, ``gamma:0.5`` or ``ramp:1,16,60``.

        Raises:
            ConfigError: another form, or numbers that cannot be.
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
        raise ConfigError(f"{text!r} says no arrivals", f"write {_FORMS}")

    def times(self, rate: float, seed: int) -> Iterator[float]:
        """Seconds from the start, endless and ascending, ``rate`` a second in the mean.

        A ramp has rates of its own. Constant arrivals begin at 0, others with their first gap.

        Raises:
            ConfigError: a rate that is not above 0.
        """
        if self.kind != "ramp" and not 0 < rate < math.inf:
            raise ConfigError(f"{rate:g} requests a second is no rate", "give one above 0")
        return self._times(rate, Random(f"arrivals {seed}"))

    def _times(self, rate: float, dice: Random) -> Iterator[float]:
        now, events = 0.0, 0.0
        while True:
            if self.kind == "constant":
                yield events / rate
                events += 1
            elif self.kind == "ramp":
                events += dice.expovariate(1.0)
                yield self._ramped(events)
            else:
                now += dice.gammavariate(self.burstiness, 1 / (rate * self.burstiness))
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


def scheduled(requests: Iterable[Request], times: Iterable[float]) -> Iterator[Request]:
    """The requests, each due at the next of the times.

    Of a conversation only the first turn is; the others follow their answers.
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
