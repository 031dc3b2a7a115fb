"""Two places that reach each other over a network: namespaces with a cable between them.

Where the system does not let us make those, both are this machine's loopback.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_SERVER, _ROUTER = "10.77.0.1", "10.77.0.2"
_SECONDS = 20.0


@dataclass(frozen=True)
class Host:
    """Where a process may run, and how others reach it."""

    address: str
    prefix: tuple[str, ...] = ()
    """Of a command that is to run there."""


def missing_support() -> str:
    """Why there can be no namespaces here; empty: there can."""
    for name in ("unshare", "nsenter", "ip"):
        if shutil.which(name) is None:
            return f"there is no {name}"
    words = [
        "unshare",
        "--net",
        "ip",
        "link",
        "add",
        "tgi0",
        "type",
        "veth",
        "peer",
        "name",
        "tgi1",
    ]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "unshare does not end"
    return (done.stderr.strip().splitlines() or ["unshare failed"])[-1] if done.returncode else ""


@contextlib.contextmanager
def two_hosts(namespaces: bool) -> Iterator[tuple[Host, Host]]:
    """Of the model server and of the router."""
    if not namespaces:
        yield Host("127.0.0.1"), Host("127.0.0.1")
        return
    holders: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(2):
            # A process holds the namespace; the first thing it says is that it is in it.
            holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            holders.append(holder)
            assert holder.stdout is not None
            assert holder.stdout.read(1) == b"\n"
        places = [
            Host(address, ("nsenter", "--net", "--target", str(holder.pid)))
            for address, holder in zip((_SERVER, _ROUTER), holders, strict=True)
        ]
        far = str(holders[1].pid)
        _run(places[0], "ip link add tgi0 type veth peer name tgi0 netns", far)
        for place in places:
            _run(place, "ip addr add", f"{place.address}/24", "dev tgi0")
            _run(place, "ip link set tgi0 up")
            _run(place, "ip link set lo up")
        yield places[0], places[1]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def _run(place: Host, *words: str) -> None:
    command = [*place.prefix, *" ".join(words).split()]
    subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
