"""The store of addresses, between process 0 and others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from tgi_cli.process.framing import Channel
from tgi_cli.worker.tensor_parallel.messages import (
    StoreGet,
    StoreSet,
    StoreValue,
    decode_event,
)
from tgi_cli.worker.tensor_parallel.stores import LeaderStore, RemoteStore


class Connection:
    """The channel of events of another process, and process 0's end of it.

    Attributes:
        remote: the other process's store.
    """

    def __init__(self, leader: LeaderStore) -> None:
        self.ours, self.theirs = map(Channel, socket.socketpair())
        self.leader = leader
        self.remote = RemoteStore(self.theirs)

    def start(self) -> None:
        """Serve both ends by threads."""
        threading.Thread(target=self._serve, daemon=True).start()
        threading.Thread(target=self._receive, daemon=True).start()

    def _serve(self) -> None:
        while (message := self.ours.receive()) is not None:
            event = decode_event(message)
            assert isinstance(event, StoreGet | StoreSet)
            self.leader.handle(event, self.ours)

    def _receive(self) -> None:
        while (message := self.theirs.receive()) is not None:
            event = decode_event(message)
            assert isinstance(event, StoreValue)
            self.remote.put(event.key, event.value)

    def close(self) -> None:
        for channel in (self.ours, self.theirs):
            channel.shut()
            channel.close()


@pytest.fixture
def leader() -> LeaderStore:
    return LeaderStore()


@pytest.fixture
def both(leader: LeaderStore) -> Iterator[tuple[Connection, Connection]]:
    found = Connection(leader), Connection(leader)
    yield found
    for each in found:
        each.close()


def test_values_reach_all_processes(
    leader: LeaderStore, both: tuple[Connection, Connection]
) -> None:
    for each in both:
        each.start()
    first, second = (each.remote for each in both)
    first.set("a", b"1")
    assert second.get("a") == leader.get("a") == b"1"
    leader.set("b", b"2")
    first.wait(["a", "b"], timedelta(seconds=20))
    assert first.check(["a", "b"])
    assert not second.check(["b"]), "nothing was asked"
    late = threading.Thread(target=second.set, args=("c", b"3"))
    late.start()
    assert first.get("c") == b"3"
    late.join()


def test_a_process_that_is_gone_does_not_keep_values_from_others(
    leader: LeaderStore, both: tuple[Connection, Connection]
) -> None:
    """Nor is the process that sets them taken for the one that has failed."""
    gone, other = both
    leader.handle(StoreGet("a"), gone.ours)
    leader.handle(StoreGet("a"), other.ours)
    gone.close()
    leader.handle(StoreSet("a", b"1"), other.ours)
    message = other.theirs.receive()
    assert message is not None
    assert decode_event(message) == StoreValue("a", b"1")


def test_waiting_ends_after_a_failure_and_after_the_time(leader: LeaderStore) -> None:
    with pytest.raises(RuntimeError, match="waiting for a: timed out"):
        leader.wait(["a"], timedelta(seconds=0.01))
    threading.Timer(0.05, leader.fail).start()
    with pytest.raises(RuntimeError, match="waiting for b: a process is gone"):
        leader.get("b")
    leader.set("c", b"3")
    assert leader.get("c") == b"3", "what is known can still be read"
