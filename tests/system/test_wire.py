"""The two halves of a server in two places, with mutual TLS between them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.certificate_authority import Authority, Identity
from tests.tools.network_namespaces import Host, missing_support, two_hosts
from tests.tools.server_process import START_SECONDS, STOP_SECONDS, ServerProcess, free_ports, poll
from tgi_cli.errors import ExitCode

pytestmark = pytest.mark.system

PROMPT = "def read_json(path):"
ENGINE_PORT, HTTP_PORT = 50051, 3000
_WHY_NOT = missing_support()
IN_TWO_PLACES = pytest.mark.parametrize(
    "halves",
    [_WHY_NOT == ""],
    ids=[f"on loopback, for there are no namespaces: {_WHY_NOT}" if _WHY_NOT else "in namespaces"],
    indirect=True,
)
_ASK = """
import json, sys, urllib.error, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, {"content-type": "application/json"})
try:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as a:
        print(json.dumps([a.status, a.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
except OSError as error:
    print(json.dumps([0, str(error)]))
"""


class Halves:
    """A model server and routers that reach it over TCP, each on its own host."""

    def __init__(self, folder: Path, server: Host, router: Host) -> None:
        self.folder = folder
        self.hosts = {"server": server, "router": router}
        self.authority = Authority(folder)
        self.stranger = Authority(folder, "stranger")
        self.halves: dict[str, ServerProcess] = {}
        # On loopback others may have the ports.
        self.engine_port, self.http_port = ENGINE_PORT, HTTP_PORT
        if not server.prefix:
            self.engine_port, self.http_port = free_ports(2)
        self.url = f"grpcs://{server.address}:{self.engine_port}"

    def start_server(self, *limits: str) -> ServerProcess:
        host = self.hosts["server"]
        own = self.authority.issue("server", host.address)
        return self._start(
            "server",
            "model-server",
            *("--engine-listen", f"tcp://{host.address}:{self.engine_port}"),
            *("--engine-tls-cert", str(own.certificate), "--engine-tls-key", str(own.key)),
            *("--engine-tls-client-ca", str(self.authority.certificate)),
            *limits,
        )

    def start_router(
        self, name: str, authority: Path, own: Identity | None, http_port: int = 0
    ) -> ServerProcess:
        words = ["router", "--engine-url", self.url, "--engine-tls-ca", str(authority)]
        if own is not None:
            words += ["--engine-tls-cert", str(own.certificate), "--engine-tls-key", str(own.key)]
        words += ["--hostname", "127.0.0.1", "--port", str(http_port)]
        return self._start(name, *words)

    def _start(self, name: str, *words: str) -> ServerProcess:
        host = self.hosts["server" if name == "server" else "router"]
        self.halves[name] = ServerProcess(self.folder / name, words, prefix=host.prefix)
        return self.halves[name]

    def ask(self, path: str, body: Any = None) -> tuple[int, str]:
        """Status and body of a request to the router, from its host; status 0: no listener."""
        url = f"http://127.0.0.1:{self.http_port}{path}"
        done = subprocess.run(
            [
                *self.hosts["router"].prefix,
                *(sys.executable, "-S", "-c", _ASK, url, "" if body is None else json.dumps(body)),
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        status, text = json.loads(done.stdout)
        return status, text

    def end(self) -> None:
        for half in self.halves.values():
            half.kill()


@pytest.fixture(scope="module")
def halves(request: pytest.FixtureRequest) -> Iterator[Halves]:
    with (
        tempfile.TemporaryDirectory(prefix="tgi-test-") as folder,
        two_hosts(request.param) as (server, router),
    ):
        made = Halves(Path(folder), server, router)
        try:
            yield made
        finally:
            made.end()


@IN_TWO_PLACES
def test_two_halves_with_mutual_tls(halves: Halves) -> None:
    own = halves.authority.issue("router")
    router = halves.start_router("router", halves.authority.certificate, own, halves.http_port)
    server = halves.start_server("--max-total-tokens", "150", "--max-input-tokens", "100")
    seen: list[int] = []

    def healthy() -> bool:
        assert router.process.poll() is None, router.log
        assert server.process.poll() is None, server.log
        seen.append(halves.ask("/health")[0])
        return seen[-1] == 200

    # The router asks for limits, which come back when the shard has warmed up, and listens then.
    poll(healthy, START_SECONDS, "it is healthy")
    assert seen[0] == 0, "nobody listens yet"
    poll(lambda: "ready: " in server.log, 60, "the model server says so")
    status, text = halves.ask("/info")
    assert status == 200, server.log + router.log
    told = json.loads(text)
    assert (told["max_total_tokens"], told["max_input_tokens"]) == (150, 100)
    assert f"listening on {halves.url}, with TLS, for clients with a certificate" in server.log

    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12, "details": True}}
    status, text = halves.ask("/generate", body)
    assert status == 200
    assert json.loads(text)["details"]["generated_tokens"] > 0
    status, text = halves.ask("/generate", {**body, "inputs": PROMPT * 40})
    assert status == 422
    assert "must be <= 150" in json.loads(text)["error"], "the shard's limit"

    # Routers that are kept apart end with one line that says why.
    refused = {
        "stranger": (halves.authority.certificate, halves.stranger.issue("router")),
        "nobody": (halves.authority.certificate, None),
        "deceived": (halves.stranger.certificate, own),
    }
    said = {
        "stranger": "refuses the certificate",
        "nobody": "requires client certificates",
        "deceived": "is not signed by an authority of",
    }
    for name, (authority, identity) in refused.items():
        halves.start_router(name, authority, identity)
    for name, words in said.items():
        half = halves.halves[name]
        assert half.process.wait(START_SECONDS) == ExitCode.SHARD_FAILED, half.log
        (line,) = [line for line in half.log.splitlines() if line.startswith("error: ")]
        assert words in line
        assert "Traceback" not in half.log

    status, _ = halves.ask("/generate", body)
    assert status == 200, "who was refused disturbs nobody"
    for half in (router, server):
        half.process.send_signal(signal.SIGTERM)
        assert half.process.wait(STOP_SECONDS) == ExitCode.OK, half.log
