"""The supervisor, with small processes in the roles of model server and router."""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.tools.certificate_authority import CertificateFiles
from tests.tools.process_tree import is_gone
from tests.tools.server_process import free_ports
from tgi_cli.errors import ExitCode, RouterError, ShardError, TgiError
from tgi_cli.launcher import backoff, oom, supervisor
from tgi_cli.launcher.backoff import Restarts
from tgi_cli.launcher.child_process import ChildProcess
from tgi_cli.launcher.health_probe import HEALTH, HealthProbe
from tgi_cli.launcher.model_server import ModelServerParts
from tgi_cli.launcher.oom import Kills
from tgi_cli.launcher.supervisor import ServerParts, Supervisor
from tgi_cli.process.heartbeat import SharedHeartbeat

WAITS = """
    import signal, sys, time
    def end(*_):
        open(FILE, "a").write(NAME + "\\n")
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    open(UP, "a").write(NAME + "\\n")
    time.sleep(60)
"""
STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(UP, "a").write(NAME + "\\n")
    time.sleep(60)
"""
ANSWERS = """
    import http.server, signal, ssl, sys
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = ("/health", "/v2/health/live")
            self.send_response(200 if self.path in known else 404)
            self.end_headers()
        def log_message(self, *_): pass
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = http.server.HTTPServer(("127.0.0.1", PORT), Healthy)
    if certificate := False:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
"""
LIVES = """
    import os, signal, sys, time
    from pathlib import Path
    from tgi_cli.process.heartbeat import HeartbeatWriter, SharedHeartbeat
    class Engine:
        progress = live_requests = 0
    open(UP, "a").write(NAME + "\\n")
    life = len(open(UP).read().split())
    with HeartbeatWriter(SharedHeartbeat.attach(FD)).beating() as writer:
        writer.watch(Engine, 0.0)
        if life == 2 and (code := False):
            sys.exit(code)
        while life == 1 and not Path(READY).exists():
            time.sleep(0.02)
        if life == 1:
            FAULT
        time.sleep(60)
"""
"""A model server that suffers a fault in its first life, once it is ready; the second may end with
a code of its own."""
DEAD = "os.kill(os.getpid(), signal.SIGKILL)"
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
STUCK = "Engine.live_requests = 1"


class Stage:
    """What the tests start, and what was left of it."""

    def __init__(self, folder: Path) -> None:
        self.up, self.ended, self.ready = folder / "up", folder / "ended", folder / "ready"
        self.children: list[ChildProcess] = []
        (self.port,) = free_ports(1)

    def child(self, name: str, failure: type[TgiError], script: str, fd: int = -1) -> ChildProcess:
        head = (
            f"UP = {str(self.up)!r}; FILE = {str(self.ended)!r}; READY = {str(self.ready)!r}\n"
            f"NAME = {name!r}; PORT = {self.port}; FD = {fd}\n"
        )
        command = [sys.executable, "-c", head + textwrap.dedent(script)]
        child = ChildProcess(name, failure, command, [] if fd < 0 else [fd])
        self.children.append(child)
        return child

    def both_up(self) -> bool:
        """Whether both have set up their handling of signals."""
        return self.lives() == 2

    def lives(self) -> int:
        """How many children have come up."""
        return len(self.up.read_text().split()) if self.up.exists() else 0

    def run(
        self,
        server: str | dict[str, str],
        router: str,
        grace: float = 20.0,
        tls: bool = False,
        most: int = 0,
        timeout: float = 0.0,
    ) -> int:
        probe = HealthProbe("127.0.0.1", self.port, tls, timeout=0.5)

        def start_server(name: str, script: str) -> tuple[ChildProcess, SharedHeartbeat]:
            heartbeat = SharedHeartbeat.create()
            child = self.child(name, ShardError, script, heartbeat.fd)
            heartbeat.close_fd()
            return child, heartbeat

        servers = {"server": server} if isinstance(server, str) else server
        both = Supervisor(grace, lambda: Restarts(most, draw=lambda: 0.0), timeout)
        with both.handling_signals():
            return both.run(
                ServerParts(
                    model_servers=[
                        ModelServerParts(
                            start=partial(start_server, name, script),
                            usable=lambda: probe.ask(HEALTH) == 200,
                        )
                        for name, script in servers.items()
                    ],
                    start_router=lambda: self.child("router", RouterError, router),
                    probe=probe,
                    on_ready=self.ready.touch,
                )
            )

    def names(self) -> list[str]:
        """The children in the order of their starts."""
        return [child.name for child in self.children]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(backoff, "FIRST_SECONDS", 0.1)
    stage = Stage(tmp_path)
    yield stage
    assert not any(child.running for child in stage.children), "a child was left"


def signal_when(condition: Callable[[], bool], *numbers: signal.Signals) -> None:
    """Send this process signals once a condition holds; none if it does not within two minutes."""

    def send() -> None:
        end = time.monotonic() + 120
        while not condition():
            if time.monotonic() > end:
                return  # the test is over, or pytest-timeout ends it: a signal would end pytest
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(1)  # two that wait to be handled would be one

    threading.Thread(target=send, daemon=True).start()


def exits(status: int) -> str:
    return f"import sys; sys.exit({status})"


@pytest.mark.parametrize("status", [2, 3, 4, 5, 6, 7])
def test_the_exit_code_of_a_reported_error_is_passed_on(stage: Stage, status: int) -> None:
    assert stage.run(exits(status), WAITS) == status


def test_an_unexplained_end_of_the_server_has_its_own_code(stage: Stage) -> None:
    assert stage.run(exits(1), WAITS) == ExitCode.SHARD_FAILED


def test_an_unexplained_end_of_the_router_has_its_own_code(stage: Stage) -> None:
    assert stage.run(WAITS, exits(1)) == ExitCode.ROUTER_FAILED


KILLED = "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((4, 4), "memory did not run out"),
        ((4, 5), "the kernel killed a process of this cgroup because memory ran out"),
        ((None, None), "the kernel's out-of-memory killer did that"),
    ],
)
@pytest.mark.parametrize("role", ["server", "router"])
def test_a_killed_child_is_explained(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    counts: tuple[int | None, int | None],
    expected: str,
) -> None:
    # Each of the two has a count at its start.
    given = iter([counts[0], counts[0], counts[1]])

    def kills() -> Kills | None:
        count = next(given)
        return None if count is None else Kills(count, "this cgroup")

    monkeypatch.setattr(oom, "kills", kills)
    error = ShardError if role == "server" else RouterError
    with pytest.raises(error, match=f"{role} was killed by SIGKILL") as caught:
        stage.run(KILLED if role == "server" else WAITS, WAITS if role == "server" else KILLED)
    assert expected in caught.value.remedy


def test_an_unexpected_end_names_the_child(stage: Stage) -> None:
    with pytest.raises(RouterError, match="router ended unexpectedly"):
        stage.run(WAITS, exits(0))


def test_it_is_ready_once_health_succeeds(stage: Stage) -> None:
    signal_when(stage.ready.exists, signal.SIGTERM)
    assert stage.run(WAITS, ANSWERS) == ExitCode.OK
    assert stage.ready.exists()


def test_health_is_requested_over_tls(stage: Stage, tmp_path: Path) -> None:
    both = CertificateFiles.make(tmp_path).both
    signal_when(stage.ready.exists, signal.SIGTERM)
    assert stage.run(WAITS, ANSWERS.replace("False", f"{str(both)!r}"), tls=True) == ExitCode.OK
    assert stage.ready.exists()


def test_ctrl_c_after_it_was_ready_is_success(stage: Stage) -> None:
    signal_when(stage.ready.exists, signal.SIGINT)
    assert stage.run(WAITS, ANSWERS) == ExitCode.OK


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_it_was_ready_is_success(stage: Stage, number: signal.Signals) -> None:
    signal_when(stage.both_up, number)
    assert stage.run(WAITS, WAITS) == ExitCode.OK
    assert not stage.ready.exists()


def test_the_router_drains_before_the_server_stops(stage: Stage) -> None:
    signal_when(stage.both_up, signal.SIGTERM)
    assert stage.run(WAITS, WAITS) == ExitCode.OK
    assert stage.ended.read_text().split() == ["router", "server"]


def test_a_second_signal_stops_at_once(stage: Stage) -> None:
    signal_when(stage.both_up, signal.SIGTERM, signal.SIGTERM)
    assert stage.run(STUBBORN, STUBBORN, grace=250.0) == ExitCode.INTERRUPTED


def test_a_router_that_does_not_end_in_time_is_killed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_ROUTER_MARGIN", 0.1)
    signal_when(stage.both_up, signal.SIGTERM)
    assert stage.run(WAITS, STUBBORN, grace=0.1) == ExitCode.OK
    assert stage.ended.read_text().split() == ["server"]


def test_the_probe_needs_a_health_response(stage: Stage) -> None:
    """Something that accepts and never answers well is not ready."""
    unwell = ANSWERS.replace("200 if", "503 if")

    def probed() -> bool:
        try:
            socket.create_connection(("127.0.0.1", stage.port), timeout=1).close()
        except OSError:
            return False
        time.sleep(0.3)
        return True

    signal_when(probed, signal.SIGTERM)
    assert stage.run(WAITS, unwell) == ExitCode.OK
    assert not stage.ready.exists()


@pytest.mark.parametrize("fault", [DEAD, STOPPED, STUCK], ids=["dead", "stopped", "stuck"])
def test_a_server_that_dies_while_serving_is_restarted(
    stage: Stage, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    signal_when(lambda: "serving again" in caplog.text, signal.SIGTERM)
    with caplog.at_level("INFO", "tgi_cli.launcher"):
        status = stage.run(LIVES.replace("FAULT", fault), ANSWERS, most=1, timeout=8.0)
    assert status == ExitCode.OK
    assert [child.name for child in stage.children] == ["server", "router", "server"]
    why = {
        DEAD: "the server was killed by SIGKILL",
        STOPPED: "the model server has not run for 8 s",
        STUCK: "no step of the engine has ended for 8 s while requests wait",
    }[fault]
    assert why in caplog.text
    assert "(try 1 of 1)" in caplog.text


def test_a_failed_restart_is_retried(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Even if it reports an error: it has served before."""
    script = LIVES.replace("FAULT", DEAD).replace("False", str(int(ExitCode.OUT_OF_MEMORY)))
    signal_when(lambda: "serving again" in caplog.text and stage.lives() == 3, signal.SIGTERM)
    with caplog.at_level("INFO", "tgi_cli.launcher"):
        assert stage.run(script, ANSWERS, most=5) == ExitCode.OK
    assert "ended with code 6; restarting it" in caplog.text


def test_too_many_deaths_end_everything(stage: Stage) -> None:
    script = LIVES.replace("life == 1", "True").replace("FAULT", DEAD)
    with pytest.raises(ShardError, match=r"killed by SIGKILL, after 2 restarts within 10 min"):
        stage.run(script, ANSWERS, most=2)
    assert stage.lives() == 3


def test_without_restarts_a_death_ends_everything(stage: Stage) -> None:
    with pytest.raises(ShardError, match=r"the server was killed by SIGKILL$"):
        stage.run(LIVES.replace("FAULT", DEAD), ANSWERS)
    assert stage.lives() == 1


SERVES = """
    import os, signal, sys, time
    from tgi_cli.process.heartbeat import HeartbeatWriter, SharedHeartbeat
    class Engine:
        progress = live_requests = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with HeartbeatWriter(SharedHeartbeat.attach(FD)).beating() as writer:
        writer.watch(Engine, 0.0)
        while not os.path.exists(READY):
            time.sleep(0.02)
        FAULT
        time.sleep(60)
"""
"""A replica that ends on SIGTERM, and suffers a fault once all are ready."""
LASTS = SERVES.replace("FAULT", "pass")
DIES = SERVES.replace("FAULT", DEAD)


def test_the_death_of_one_replica_leaves_the_other(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that has no restart left: it is tried again when its limit allows that."""
    signal_when(lambda: "after 2 restarts; the next in" in caplog.text, signal.SIGTERM)
    with caplog.at_level("INFO", "tgi_cli.launcher"):
        assert stage.run({"one": LASTS, "two": DIES}, ANSWERS, most=2) == ExitCode.OK
    assert stage.names() == ["one", "two", "router", "two", "two"]
    assert "(try 2 of 2)" in caplog.text
    assert "one was killed" not in caplog.text


def test_sighup_restarts_replicas_one_by_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_has_terminal", lambda: False)
    signal_when(stage.ready.exists, signal.SIGHUP)
    signal_when(lambda: "all model servers have been restarted" in caplog.text, signal.SIGTERM)
    with caplog.at_level("INFO", "tgi_cli.launcher"):
        assert stage.run({"one": LASTS, "two": LASTS}, ANSWERS) == ExitCode.OK
    assert stage.names() == ["one", "two", "router", "one", "two"]
    first, second = (caplog.text.index(f"{name}: serving again") for name in ("one", "two"))
    assert first < second


@pytest.mark.parametrize(("terminal", "servers"), [(True, 2), (False, 1)])
def test_sighup_ends_a_command_of_a_terminal_and_a_single_model_server(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, terminal: bool, servers: int
) -> None:
    monkeypatch.setattr(supervisor, "_has_terminal", lambda: terminal)
    signal_when(stage.ready.exists, signal.SIGHUP)
    names = [f"server {index}" for index in range(servers)]
    assert stage.run(dict.fromkeys(names, LASTS), ANSWERS) == ExitCode.OK
    assert stage.names() == [*names, "router"]


def test_a_signal_between_restarts_stops_in_order(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "FIRST_SECONDS", 250.0)
    monkeypatch.setattr(backoff, "LONGEST_SECONDS", 250.0)
    signal_when(lambda: stage.ready.exists() and not stage.children[0].running, signal.SIGTERM)
    assert stage.run(LIVES.replace("FAULT", DEAD), ANSWERS, most=1) == ExitCode.OK
    assert stage.lives() == 1


def test_an_unresponsive_router_is_killed(stage: Stage) -> None:
    stop = "if pathlib.Path(READY).exists(): os.kill(os.getpid(), signal.SIGSTOP)"
    stops = "import pathlib, signal, os\n" + textwrap.dedent(ANSWERS).replace(
        "def do_GET(self):", f"def do_GET(self):\n        {stop}"
    )
    with pytest.raises(RouterError, match=r"the router has not answered for 6 s"):
        stage.run(LIVES.replace("FAULT", "pass"), stops, most=1, timeout=6.0)


def test_grandchildren_end_with_their_parent(stage: Stage) -> None:
    """Even what is stopped, or deaf."""
    script = """
        import os, signal, subprocess, sys, time
        code = "import signal, time; signal.signal(signal.SIGHUP, signal.SIG_IGN); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code])
        open(FILE, "w").write(str(child.pid))
        os.kill(child.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with pytest.raises(ShardError):
        stage.run(script, WAITS)
    pid = int(stage.ended.read_text().split()[0].removesuffix("router"))
    end = time.monotonic() + 60
    while not is_gone(pid):
        assert time.monotonic() < end
        time.sleep(0.02)
