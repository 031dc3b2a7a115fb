"""Two hosts on one network: namespaces with a virtual cable between them.

If the system does not permit namespaces, both are this machine's loopback interface.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_SERVER, _ROUTER = "10.77.0.1", "10.77.0.2"
_SECONDS = 60.0


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        address: how other hosts reach it.
        prefix: of a command that runs in it.
    """

    address: str
    prefix: tuple[str, ...] = ()


def missing_support() -> str:
    """The reason why namespaces cannot be created; empty if they can."""
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
    """Hosts of the model server and of the router."""
    if not namespaces:
        yield Host("127.0.0.1"), Host("127.0.0.1")
        return
    holders: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(2):
            # A process holds the namespace; its first output confirms that it exists.
            holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            holders.append(holder)
            assert holder.stdout is not None
            assert holder.stdout.read(1) == b"\n"
        hosts = [
            Host(address, ("nsenter", "--net", "--target", str(holder.pid)))
            for address, holder in zip((_SERVER, _ROUTER), holders, strict=True)
        ]
        far = str(holders[1].pid)
        _run(hosts[0], "ip link add tgi0 type veth peer name tgi0 netns", far)
        for host in hosts:
            _run(host, "ip addr add", f"{host.address}/24", "dev tgi0")
            _run(host, "ip link set tgi0 up")
            _run(host, "ip link set lo up")
        yield hosts[0], hosts[1]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def _run(host: Host, *words: str) -> None:
    command = [*host.prefix, *" ".join(words).split()]
    subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
