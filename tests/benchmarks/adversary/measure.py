"""Sends what is hostile and judges what was seen."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tests.benchmarks.adversary import protocol, together
from tests.benchmarks.adversary.client import Answer, Client
from tests.benchmarks.adversary.fields import LONG_ANSWERS, Target, targets
from tests.benchmarks.adversary.server import Server
from tests.benchmarks.adversary.values import Shot, shots
from tests.benchmarks.adversary.watch import Seen, Watch


@dataclass(frozen=True)
class Budget:
    """What a request may cost.

    Attributes:
        stall: seconds that it may hold the event loop, beyond the quiet server's /health.
        growth: bytes that a process may grow beyond the answer's size.
        worker: the same for processes that bound themselves and end (grammars, templates).
    """

    stall: float = 0.05
    growth: int = 64 << 20
    worker: int = 640 << 20


@dataclass
class Result:
    """One case. Seconds and bytes, see :class:`Seen`; ``broken`` says what broke the budget."""

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
    broken: list[str] = field(default_factory=list)

    @property
    def most_growth(self) -> int:
        """Of the processes that must not grow."""
        return max((v for k, v in self.growth.items() if k != "worker"), default=0)

    def told(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Case:
    """Values for one place.

    Attributes:
        send: puts a value in its place, and sends it.
        long: an answer may take longer than the client waits.
        owner: see :class:`~tests.benchmarks.adversary.fields.Field`.
        closes: the server may close the connection without an answer.
    """

    route: str
    place: str
    shot: Shot
    send: Callable[[bytes], Answer]
    long: bool = False
    owner: str = ""
    closes: bool = False

    @property
    def name(self) -> str:
        return f"{self.route} {self.place} {self.shot.kind}".strip()


class Bench:
    """All requests against one server.

    Args:
        seconds: that a request may take before the client leaves.
        limit: bytes of a body.
    """

    def __init__(
        self, server: Server, budget: Budget, seconds: float, limit: int, guard: int
    ) -> None:
        self.server = server
        self.budget = budget
        self.limit = limit
        self.client = Client(server.address, server.key, seconds)
        self.results: list[Result] = []
        self._warm_up()
        self.watch = Watch(server.address, server.pid, server.key, guard)
        self.quiet = Seen()
        self._fatal: Counter[str] = Counter()

    def close(self) -> None:
        self.watch.close()

    def rest(self, windows: int = 20) -> Seen:
        """Watch without a case: what the machine alone does, in a window's median."""
        time.sleep(2.0)  # the stream begins
        found = []
        for _ in range(windows):
            self.watch.begin()
            time.sleep(0.2)
            found.append(self.watch.end())
        self.quiet = Seen(
            stall=statistics.median(one.stall for one in found),
            raw_stall=statistics.median(one.raw_stall for one in found),
            gap=statistics.median(one.gap for one in found),
        )
        return self.quiet

    def run(self, wanted: Callable[[str], bool], also_protocol: bool) -> None:
        """Every case that is wanted, by route, field and kind."""
        began, before = time.monotonic(), len(self.results)
        for path, kind, body in together.bodies(self.limit):
            shot = Shot(kind, lambda body=body: [body])
            case = _Case(f"POST {path}", "(together)", shot, self._poster(path), True)
            if wanted(case.name):
                self._case(case)
        self._progress("together", before, began)
        if also_protocol:
            began, before = time.monotonic(), len(self.results)
            for attack in protocol.attacks(self.limit):
                self._attack(attack)
            self._progress("protocol", before, began)
        known: set[str] = set()
        for target in targets():
            began, before = time.monotonic(), len(self.results)
            for case in self._of(target, known):
                if wanted(case.name):
                    self._case(case)
            if len(self.results) > before:
                self._progress(target.name, before, began)

    def _of(self, target: Target, known: set[str]) -> Iterator[_Case]:
        """The cases of one route."""
        path, name = target.path, target.name
        if not target.bodies:
            for size in (100, 10_000):
                shot = Shot(f"{size:,} characters", lambda size=size: [b"a" * size])
                yield _Case(name, "(query)", shot, self._asker(target, "?"))
                if "/a" in path:
                    yield _Case(name, "(path)", shot, self._asker(target, ""))
            return
        post = self._poster(path)
        for kind, make in protocol.BODIES.items():
            shot = Shot(kind, lambda make=make: [make(self.limit)])
            yield _Case(name, "(body)", shot, post)
        for place in target.fields():
            whole = place.owner not in known
            known.add(place.owner)
            room = self.limit - len(place.around(b"")) - 2
            for shot in shots(place.type, room, place.items, whole):
                long = place.name in LONG_ANSWERS or shot.kind.startswith("many ")
                send = self._poster(path, place.around)
                yield _Case(name, place.path, shot, send, long, place.owner)

    def _poster(self, path: str, around: Callable[[bytes], bytes] = bytes) -> Any:
        return lambda raw: self.client.ask("POST", path, around(raw))

    def _asker(self, target: Target, sign: str) -> Any:
        def ask(raw: bytes) -> Answer:
            text = raw.decode()
            path = target.path + sign + text if sign else target.path.replace("/a", f"/{text}", 1)
            return self.client.ask(target.method, path, None)

        return ask

    def _case(self, case: _Case) -> None:
        if self._fatal[case.owner] >= 2:
            broken = ["not sent: this field has ended the server twice"]
            self.results.append(Result(case.route, case.place, case.shot.kind, broken=broken))
            return
        values = list(case.shot.values())
        groups = [[value] for value in values] if case.shot.apart else [values]
        for number, group in enumerate(groups):
            kind = f"{case.shot.kind} [{number}]" if case.shot.apart else case.shot.kind
            named = replace(case, shot=Shot(kind, lambda group=group: group))
            self.results.append(self._measured(named))

    def _attack(self, attack: protocol.Attack) -> None:
        def send(_: bytes) -> Answer:
            try:
                return attack.run(self.client)
            except OSError:  # it takes no connection
                return Answer(0, 0.0, 0, "")

        case = _Case("(protocol)", attack.name, Shot("", lambda: [b""]), send)
        self.results.append(self._measured(replace(case, closes=attack.closes)))

    def _measured(self, case: _Case) -> Result:
        """One case, up to three times while it is the machine that may have been slow.

        Of memory the first time counts: what has grown once need not grow again.
        """
        result = Result(case.route, case.place, case.shot.kind)
        values = case.shot.values()
        for turn in range(3):
            result.runs = turn + 1
            self.watch.begin()
            answers = [case.send(value) for value in values]
            seen = self.watch.end()
            if turn == 0:
                size = max(answer.size for answer in answers)
                result.growth = {role: n - size for role, n in seen.growth.items()}
                result.statuses = dict(Counter(str(answer.status) for answer in answers))
                result.seconds = max(answer.seconds for answer in answers)
                result.stall, result.raw_stall, result.gap = seen.stall, seen.raw_stall, seen.gap
            else:
                result.stall = min(result.stall, seen.stall)
                result.raw_stall = min(result.raw_stall, seen.raw_stall)
                result.gap = min(result.gap, seen.gap)
            late = not case.long and any(answer.status == -1 for answer in answers)
            result.broken += self._hard(answers, seen, late, case.closes)
            if seen.lost or seen.guarded or late or seen.stall >= 5 or not self.server.healthy():
                again = self._recover(result)
                self._fatal[case.owner] += again and bool(case.owner)
                break
            if result.broken or not self._slow(result):
                break
        if self._slow(result):
            result.broken.append(f"/health took {result.stall * 1e3:.0f} ms")
        for role, grown in result.growth.items():
            most = self.budget.worker if role == "worker" else self.budget.growth
            if grown > most:
                result.broken.append(f"{role} grew by {grown >> 20} MB")
        result.broken = list(dict.fromkeys(result.broken))
        if result.broken:
            print(f"  {case.name}: {'; '.join(result.broken)}", file=sys.stderr)
        return result

    def _slow(self, result: Result) -> bool:
        return result.stall > self.budget.stall + self.quiet.stall

    def _hard(self, answers: list[Answer], seen: Seen, late: bool, closes: bool) -> list[str]:
        """What no second run excuses."""
        found = []
        for answer in answers:
            if answer.blames_server:
                found.append(f"{answer.status} {answer.text[:100]!r}")
            if answer.status == 0 and not closes:
                found.append("the connection ended without an answer")
        if late:
            found.append(f"no answer in {self.client.seconds:g} s")
        found += [f"the {role} was ended or replaced" for role in seen.lost]
        found += [f"ended by this benchmark: {one}" for one in seen.guarded]
        return found

    def _recover(self, result: Result) -> bool:
        """Wait until the server is well; whether it had to be started again."""
        if again := self.server.recover(20):
            result.broken.append("the server had to be started again")
            self._warm_up()
        self.watch.renew(self.server.pid)
        time.sleep(0.5)
        return again

    def _warm_up(self) -> None:
        """What is built once, with the first request of a kind, is no case's."""
        for _ in range(2):
            for target in targets():
                for body in target.samples():
                    self.client.ask(target.method, target.path, body)
        chat = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":2,'
        for more in (
            b'"response_format":{"type":"json_object"}}',
            b'"guided_regex":"a+"}',
            b'"logprobs":true,"top_logprobs":2,"n":2}',
            b'"stop":["b"],"bad_words":["c"],"logit_bias":{"5":1}}',
            b'"tools":[{"type":"function","function":{"name":"a"}}],"tool_choice":"required"}',
        ):
            self.client.ask("POST", "/v1/chat/completions", chat + more)
        long = b'"the quick brown fox"' + b',"the quick brown fox"' * 5000
        self.client.ask("POST", "/tokenize", b'{"inputs":"' + b"word " * 20_000 + b'"}')
        self.client.ask("POST", "/v1/completions", b'{"prompt":[' + long + b"]}")

    def _progress(self, name: str, before: int, began: float) -> None:
        found = self.results[before:]
        broken = sum(bool(one.broken) for one in found)
        seconds = time.monotonic() - began
        print(f"{name}: {len(found)} cases, {broken} broken, {seconds:.0f} s", file=sys.stderr)
