"""Two small processes stand for the model server and the router."""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tools.certificates import Files
from tgi_cli.errors import ExitCode, RouterError, ShardError, TgiError
from tgi_cli.launcher import listener, supervisor
from tgi_cli.launcher.children import Child
from tgi_cli.launcher.supervisor import Supervisor

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
            self.send_response(200 if self.path == "/health" else 404)
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


class Stage:
    """What the tests start, and what was left of it."""

    def __init__(self, folder: Path) -> None:
        self.up, self.ended = folder / "up", folder / "ended"
        self.children: list[Child] = []
        with listener.bind("127.0.0.1", 0) as sock:
            self.port = listener.local_address(sock)[1]
        self.ready = threading.Event()

    def child(self, name: str, failure: type[TgiError], script: str) -> Callable[[], Child]:
        head = (
            f"UP = {str(self.up)!r}; FILE = {str(self.ended)!r}; "
            f"NAME = {name!r}; PORT = {self.port}\n"
        )
        command = [sys.executable, "-c", head + textwrap.dedent(script)]

        def start() -> Child:
            child = Child(name, failure, command)
            self.children.append(child)
            return child

        return start

    def both_up(self) -> bool:
        """Whether both have set up their handling of signals."""
        return self.up.exists() and len(self.up.read_text().split()) == 2

    def run(self, server: str, router: str, grace: float = 20.0, tls: bool = False) -> int:
        both = Supervisor(grace)
        with both.handling_signals():
            return both.run(
                self.child("server", ShardError, server),
                self.child("router", RouterError, router),
                ("127.0.0.1", self.port),
                self.ready.set,
                tls,
            )


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    assert not any(child.running for child in stage.children), "a child was left"


def signal_when(condition: Callable[[], bool], *numbers: signal.Signals) -> None:
    """Send this process signals once a condition holds."""

    def send() -> None:
        end = time.monotonic() + 20
        while not condition() and time.monotonic() < end:
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    threading.Thread(target=send, daemon=True).start()


def exits(status: int) -> str:
    return f"import sys; sys.exit({status})"


@pytest.mark.parametrize("status", [2, 3, 4, 5, 6, 7])
def test_the_code_of_a_server_that_says_why_is_passed_on(stage: Stage, status: int) -> None:
    assert stage.run(exits(status), WAITS) == status


def test_a_server_that_fails_otherwise_gives_its_own_code(stage: Stage) -> None:
    assert stage.run(exits(1), WAITS) == ExitCode.SHARD_FAILED


def test_a_router_that_fails_otherwise_gives_its_own_code(stage: Stage) -> None:
    assert stage.run(WAITS, exits(1)) == ExitCode.ROUTER_FAILED


def test_a_killed_server_is_named_with_its_signal(stage: Stage) -> None:
    with pytest.raises(ShardError, match="server was killed by SIGKILL") as caught:
        stage.run("import os; os.kill(os.getpid(), 9)", WAITS)
    assert "memory" in caught.value.remedy


def test_a_child_that_ends_in_silence_is_named(stage: Stage) -> None:
    with pytest.raises(RouterError, match="router ended unexpectedly"):
        stage.run(WAITS, exits(0))


def test_it_is_ready_when_health_says_so(stage: Stage) -> None:
    signal_when(stage.ready.is_set, signal.SIGTERM)
    assert stage.run(WAITS, ANSWERS) == ExitCode.OK
    assert stage.ready.is_set()


def test_health_is_asked_over_tls_where_that_is_spoken(stage: Stage, tmp_path: Path) -> None:
    both = Files.make(tmp_path).both
    signal_when(stage.ready.is_set, signal.SIGTERM)
    assert stage.run(WAITS, ANSWERS.replace("False", f"{str(both)!r}"), tls=True) == ExitCode.OK
    assert stage.ready.is_set()


def test_ctrl_c_after_it_was_ready_is_success(stage: Stage) -> None:
    signal_when(stage.ready.is_set, signal.SIGINT)
    assert stage.run(WAITS, ANSWERS) == ExitCode.OK


def test_ctrl_c_before_it_was_ready_is_an_interruption(stage: Stage) -> None:
    signal_when(stage.both_up, signal.SIGINT)
    assert stage.run(WAITS, WAITS) == ExitCode.INTERRUPTED
    assert not stage.ready.is_set()


def test_the_router_drains_before_the_server_is_told(stage: Stage) -> None:
    signal_when(stage.both_up, signal.SIGTERM)
    assert stage.run(WAITS, WAITS) == ExitCode.OK
    assert stage.ended.read_text().split() == ["router", "server"]


def test_a_second_signal_ends_it_now(stage: Stage) -> None:
    signal_when(stage.both_up, signal.SIGTERM, signal.SIGTERM)
    assert stage.run(STUBBORN, STUBBORN, grace=250.0) == ExitCode.INTERRUPTED


def test_a_router_that_does_not_end_in_time_is_killed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_ROUTER_MARGIN", 0.1)
    signal_when(stage.both_up, signal.SIGTERM)
    assert stage.run(WAITS, STUBBORN, grace=0.1) == ExitCode.OK
    assert stage.ended.read_text().split() == ["server"]


def test_the_probe_wants_health_not_just_a_port(stage: Stage) -> None:
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
    assert not stage.ready.is_set()
