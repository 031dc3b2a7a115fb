"""Sends adversarial requests to a server and checks each against the budget."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.benchmarks.adversary import combined, protocol, web_ui
from tests.benchmarks.adversary.client import Client, Response
from tests.benchmarks.adversary.fields import LONG_RESPONSES, Target, targets
from tests.benchmarks.adversary.monitor import FRONT, Monitor, Observation
from tests.benchmarks.adversary.server import Server
from tests.benchmarks.adversary.values import ValueSet, value_sets


@dataclass(frozen=True)
class Budget:
    """What a request may cost.

    Attributes:
        stall: seconds that it may delay /health beyond the latency of an idle server.
        growth: bytes that a process may grow beyond the size of the response.
        worker: the same for grammar and template processes, which limit their own memory.
    """

    stall: float = 0.05
    growth: int = 64 << 20
    worker: int = 640 << 20


@dataclass
class Result:
    """Result of one case.

    Attributes:
        stall, raw_stall, gap, growth: see :class:`Observation`.
        violations: why the case exceeded the budget, empty if it did not.
    """

    route: str
    field: str
    kind: str
    statuses: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    stall: float = 0.0
    raw_stall: float = 0.0
    gap: float = 0.0
    growth: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    violations: list[str] = field(default_factory=list)

    @property
    def largest_growth(self) -> int:
        """Bytes by which any process but a worker grew at most."""
        return max((v for k, v in self.growth.items() if k != "worker"), default=0)


@dataclass(frozen=True)
class _Case:
    """Values for one field.

    Attributes:
        field_path: such as ``messages[].content``.
        send: sends a request with one value of the field.
        long: a response may take longer than the client's timeout.
        owner: see :class:`~tests.benchmarks.adversary.fields.Field`.
        closes, statuses, unloads: see :class:`~tests.benchmarks.adversary.protocol.Attack`.
    """

    route: str
    field_path: str
    value_set: ValueSet
    send: Callable[[bytes], Response]
    long: bool = False
    owner: str = ""
    closes: bool = False
    statuses: tuple[int, ...] = ()
    unloads: bool = False

    @property
    def name(self) -> str:
        return f"{self.route} {self.field_path} {self.value_set.kind}".strip()


class Bench:
    """Runs all cases against one server.

    Args:
        seconds: timeout of a request.
        limit: largest body in bytes.
        guard: bytes of growth at which a process is killed.
        front: the server is one of several models.
    """

    def __init__(
        self,
        server: Server,
        budget: Budget,
        seconds: float,
        limit: int,
        guard: int,
        front: bool = False,
    ) -> None:
        self.server = server
        self.budget = budget
        self.limit = limit
        self.client = Client(server.address, server.key, seconds)
        self.results: list[Result] = []
        self._warm_up()
        self.monitor = Monitor(server.address, server.pid, server.key, guard, front)
        self.idle = Observation()
        self._fatal: Counter[str] = Counter()

    def close(self) -> None:
        self.monitor.close()

    def measure_idle(self, windows: int = 20) -> Observation:
        """Monitor the server without a case; return the medians of ``windows`` observations."""
        time.sleep(2.0)  # let the stream start
        found = []
        for _ in range(windows):
            self.monitor.begin()
            time.sleep(0.2)
            found.append(self.monitor.end())
        self.idle = Observation(
            stall=statistics.median(one.stall for one in found),
            raw_stall=statistics.median(one.raw_stall for one in found),
            gap=statistics.median(one.gap for one in found),
        )
        return self.idle

    def run(self, wanted: Callable[[str], bool], also_protocol: bool) -> None:
        """Run every case whose name is ``wanted``."""
        began, before = time.monotonic(), len(self.results)
        for path, kind, body in combined.bodies(self.limit):
            value_set = ValueSet(kind, lambda body=body: [body])
            case = _Case(f"POST {path}", "(combined)", value_set, self._poster(path), True)
            if wanted(case.name):
                self._case(case)
        self._progress("combined", before, began)
        if also_protocol:
            self.run_attacks("protocol", protocol.attacks(self.limit))
            self.run_attacks("web UI", web_ui.attacks(self.limit))
        known: set[str] = set()
        for target in targets():
            began, before = time.monotonic(), len(self.results)
            for case in self._cases(target, known):
                if wanted(case.name):
                    self._case(case)
            if len(self.results) > before:
                self._progress(target.name, before, began)

    def run_attacks(self, part: str, attacks: Iterable[protocol.Attack]) -> None:
        """Run attacks under the name of their part."""
        began, before = time.monotonic(), len(self.results)
        for attack in attacks:
            self._attack(part, attack)
        self._progress(part, before, began)

    def _cases(self, target: Target, known: set[str]) -> Iterator[_Case]:
        """Yield the cases of one route; ``known`` collects the fields that are covered."""
        path, name = target.path, target.name
        if not target.bodies:
            for size in (100, 10_000):
                value_set = ValueSet(f"{size:,} characters", lambda size=size: [b"a" * size])
                yield _Case(name, "(query)", value_set, self._getter(target, "?"))
                if "/a" in path:
                    yield _Case(name, "(path)", value_set, self._getter(target, ""))
            return
        post = self._poster(path)
        for kind, make in protocol.BODIES.items():
            value_set = ValueSet(kind, lambda make=make: [make(self.limit)])
            yield _Case(name, "(body)", value_set, post)
        for body_field in target.fields():
            full = body_field.owner not in known
            known.add(body_field.owner)
            size = self.limit - len(body_field.around(b"")) - 2
            for value_set in value_sets(body_field.type, size, body_field.items, full):
                long = body_field.name in LONG_RESPONSES or value_set.kind.startswith("many ")
                send = self._poster(path, body_field.around)
                yield _Case(name, body_field.path, value_set, send, long, body_field.owner)

    def _poster(self, path: str, around: Callable[[bytes], bytes] = bytes) -> Any:
        return lambda raw: self.client.request("POST", path, around(raw))

    def _getter(self, target: Target, sign: str) -> Any:
        def send(raw: bytes) -> Response:
            text = raw.decode()
            path = target.path + sign + text if sign else target.path.replace("/a", f"/{text}", 1)
            return self.client.request(target.method, path, None)

        return send

    def _case(self, case: _Case) -> None:
        if self._fatal[case.owner] >= 2:
            violations = ["skipped: this field has crashed the server twice"]
            self.results.append(
                Result(case.route, case.field_path, case.value_set.kind, violations=violations)
            )
            return
        values = list(case.value_set.values())
        groups = [[value] for value in values] if case.value_set.separate else [values]
        for number, group in enumerate(groups):
            kind = (
                f"{case.value_set.kind} [{number}]"
                if case.value_set.separate
                else case.value_set.kind
            )
            named = replace(case, value_set=ValueSet(kind, lambda group=group: group))
            self.results.append(self._measured(named))

    def _attack(self, part: str, attack: protocol.Attack) -> None:
        def send(_: bytes) -> Response:
            try:
                return attack.run(self.client)
            except OSError:  # the server refuses the connection
                return Response(0, 0.0, 0, "")

        case = _Case(f"({part})", attack.name, ValueSet("", lambda: [b""]), send)
        case = replace(case, closes=attack.closes, statuses=attack.statuses, unloads=attack.unloads)
        self.results.append(self._measured(case))

    def _measured(self, case: _Case) -> Result:
        """Run one case, restarted up to twice if only a latency exceeds the budget.

        Memory growth is taken from the first run, since memory that has grown may be reused.
        """
        result = Result(case.route, case.field_path, case.value_set.kind)
        values = case.value_set.values()
        for attempt in range(3):
            result.runs = attempt + 1
            self.monitor.begin()
            responses = [case.send(value) for value in values]
            seen = self.monitor.end()
            if case.unloads:
                seen.lost = [role for role in seen.lost if role == FRONT]
            if attempt == 0:
                size = max(response.size for response in responses)
                result.growth = {role: n - size for role, n in seen.growth.items()}
                result.statuses = dict(Counter(str(response.status) for response in responses))
                result.seconds = max(response.seconds for response in responses)
                result.stall, result.raw_stall, result.gap = seen.stall, seen.raw_stall, seen.gap
            else:
                result.stall = min(result.stall, seen.stall)
                result.raw_stall = min(result.raw_stall, seen.raw_stall)
                result.gap = min(result.gap, seen.gap)
            late = not case.long and any(response.status == -1 for response in responses)
            result.violations += self._failures(responses, seen, late, case)
            if seen.lost or seen.guarded or late or seen.stall >= 5 or not self.server.healthy():
                restarted = self._recover(result)
                self._fatal[case.owner] += restarted and bool(case.owner)
                break
            if result.violations or not self._slow(result):
                break
        if self._slow(result):
            result.violations.append(f"/health took {result.stall * 1e3:.0f} ms")
        for role, growth in result.growth.items():
            limit = self.budget.worker if role == "worker" else self.budget.growth
            if growth > limit:
                result.violations.append(f"{role} grew by {growth >> 20} MB")
        result.violations = list(dict.fromkeys(result.violations))
        if result.violations:
            print(f"  {case.name}: {'; '.join(result.violations)}", file=sys.stderr)
        return result

    def _slow(self, result: Result) -> bool:
        return result.stall > self.budget.stall + self.idle.stall

    def _failures(
        self, responses: list[Response], seen: Observation, late: bool, case: _Case
    ) -> list[str]:
        """Return the violations that another run cannot disprove."""
        found = []
        for response in responses:
            if response.blames_server:
                found.append(f"{response.status} {response.text[:100]!r}")
            if response.status == 0 and not case.closes:
                found.append("the connection closed without a response")
            elif case.statuses and response.status not in case.statuses:
                found.append(f"{response.status} instead of {case.statuses}")
        if late:
            found.append(f"no response within {self.client.seconds:g} s")
        found += [f"the {role} died or was replaced" for role in seen.lost]
        found += [f"killed by this benchmark: {one}" for one in seen.guarded]
        return found

    def _recover(self, result: Result) -> bool:
        """Wait until the server is healthy; return whether it had to be restarted."""
        if restarted := self.server.recover(20):
            result.violations.append("the server had to be restarted")
            self._warm_up()
        self.monitor.renew(self.server.pid)
        time.sleep(0.5)
        return restarted

    def _warm_up(self) -> None:
        """Send one request of each kind, so that no case pays for lazy initialization."""
        for _ in range(2):
            for target in targets():
                for body in target.samples():
                    self.client.request(target.method, target.path, body)
        chat = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":2,'
        for more in (
            b'"response_format":{"type":"json_object"}}',
            b'"guided_regex":"a+"}',
            b'"logprobs":true,"top_logprobs":2,"n":2}',
            b'"stop":["b"],"bad_words":["c"],"logit_bias":{"5":1}}',
            b'"tools":[{"type":"function","function":{"name":"a"}}],"tool_choice":"required"}',
        ):
            self.client.request("POST", "/v1/chat/completions", chat + more)
        long = b'"the quick brown fox"' + b',"the quick brown fox"' * 5000
        self.client.request("POST", "/tokenize", b'{"inputs":"' + b"word " * 20_000 + b'"}')
        self.client.request("POST", "/v1/completions", b'{"prompt":[' + long + b"]}")

    def _progress(self, name: str, before: int, began: float) -> None:
        found = self.results[before:]
        exceeded = sum(bool(one.violations) for one in found)
        seconds = time.monotonic() - began
        print(
            f"{name}: {len(found)} cases, {exceeded} exceeded the budget, {seconds:.0f} s",
            file=sys.stderr,
        )
