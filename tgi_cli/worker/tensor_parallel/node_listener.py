"""Node 0's side of a model on several nodes: admits the others, and accepts their processes.

It listens while a model starts, and no longer. A stranger who connects gets a random number; until
it has proved that it knows the secret, it takes one of a few threads for at most some seconds.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable

import msgspec

from tgi_cli.config import EngineConfig, ServeConfig
from tgi_cli.process.authenticated_channel import (
    AuthenticatedChannel,
    AuthenticationError,
    accept,
    read_secret,
)
from tgi_cli.process.bind import bind
from tgi_cli.version import __version__
from tgi_cli.worker.tensor_parallel import node_messages as nodes
from tgi_cli.worker.tensor_parallel.connected_node import ConnectedNode
from tgi_cli.worker.tensor_parallel.node_identity import describe_node, other_version, refusal
from tgi_cli.worker.tensor_parallel.shard_process import RemoteShardProcess

log = logging.getLogger(__name__)

_HANDSHAKE_SECONDS = 5.0
_MAX_STRANGERS = 64
"""Connections at a time that have not said yet what they are; more are closed."""
_EVENT_SECONDS = 5.0
"""Time limit for the rest of an event, as with processes on this node."""
_MAX_WARNINGS = 20
"""About strangers: they do not fill the log."""
_POLL_SECONDS = 0.5


class NodeListener:
    """Accepts the other nodes of a model, until :meth:`close`.

    Args:
        serve: the settings of node 0.
        config: the same, resolved.

    Attributes:
        nodes: those that were admitted, by their ranks; grows in another thread.

    Raises:
        TgiError: the secret cannot be read, or the address cannot be bound.
    """

    def __init__(self, serve: ServeConfig, config: EngineConfig) -> None:
        assert serve.node_secret_file is not None
        self._config = config
        self._secret = read_secret(serve.node_secret_file)
        self._own = describe_node(serve, config.model_path)
        self._run = secrets.token_hex(16)
        self._strangers = threading.Semaphore(_MAX_STRANGERS)
        self._lock = threading.Lock()
        self._halves: dict[int, dict[str, AuthenticatedChannel]] = {}
        """By process, those of its two channels that have connected."""
        self._closed = threading.Event()
        self._refusals = 0
        self.nodes: dict[int, ConnectedNode] = {}
        self._socket = bind(serve.master_addr, serve.master_port, "--master-addr", "--master-port")

    def start(self, on_process: Callable[[RemoteShardProcess], None]) -> None:
        """Accept connections in a thread.

        ``on_process`` is called, from any thread, with each process that has connected.
        """
        self._on_process = on_process
        self._socket.listen(_MAX_STRANGERS)
        self._socket.settimeout(_POLL_SECONDS)
        threading.Thread(target=self._accept_all, name="nodes", daemon=True).start()

    @property
    def address(self) -> str:
        """The address by which other nodes reach this one, one of which has connected."""
        return self.connected()[0].channel.own_address

    def connected(self) -> list[ConnectedNode]:
        """The nodes that were admitted."""
        with self._lock:
            return list(self.nodes.values())

    def log_missing(self) -> None:
        """Log which nodes have not been admitted yet."""
        with self._lock:
            ranks = [rank for rank in range(1, self._config.nnodes) if rank not in self.nodes]
        if ranks:
            several = "nodes" if len(ranks) > 1 else "node"
            log.info("waiting for %s %s", several, ", ".join(map(str, ranks)))

    def places(self) -> tuple[str, ...]:
        """Which stages each node has, for reports."""
        names = {0: "node 0"} | {node.rank: node.name for node in self.connected()}
        return tuple(
            f"{', '.join(self._config.stages_on(rank))} on {names[rank]}" for rank in sorted(names)
        )

    def stop_listening(self) -> None:
        """Close the port soon: all processes have connected. May be called twice."""
        self._closed.set()

    def close(self) -> None:
        """End the other nodes' part in this model. May be called twice."""
        self._closed.set()
        with self._lock:
            channels = [node.channel for node in self.nodes.values()]
            channels += [each for half in self._halves.values() for each in half.values()]
        for channel in channels:
            channel.shut()

    # ------------------------------------------------------------------ connections

    def _accept_all(self) -> None:
        with self._socket:
            while not self._closed.is_set():
                try:
                    connection, address = self._socket.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # such as too many open files
                    log.warning("a node's connection cannot be accepted: %s", error.strerror)
                    self._closed.wait(_POLL_SECONDS)
                    continue
                if not self._strangers.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(
                    target=self._greet, args=(connection, address[0]), name="node", daemon=True
                ).start()

    def _greet(self, connection: socket.socket, host: str) -> None:
        """Let a connection join, or close it."""
        kept = False
        try:
            channel = accept(connection, self._secret, _HANDSHAKE_SECONDS)
            channel.set_timeout(_HANDSHAKE_SECONDS)
            message = channel.receive()
            channel.set_timeout(None)
            if message is not None:
                kept = self._join(channel, message)
        except AuthenticationError as error:
            self._refusals += 1
            level = logging.WARNING if self._refusals <= _MAX_WARNINGS else logging.DEBUG
            log.log(level, "a connection from %s was refused: %s", host, error)
        except (OSError, ValueError) as error:
            log.debug("a connection from %s has failed: %s", host, error)
        finally:
            self._strangers.release()
            if not kept:
                connection.close()

    def _join(self, channel: AuthenticatedChannel, message: bytes) -> bool:
        """Whether what has sent ``message`` takes part from now on."""
        try:
            join = nodes.decode_join(message)
        except msgspec.DecodeError:
            join = None
        version = __version__ if isinstance(join, nodes.JoinProcess) else nodes.version_of(message)
        if join is None or version != __version__:
            return self._refuse(channel, other_version(version))
        if isinstance(join, nodes.JoinProcess):
            return self._join_process(channel, join)
        return self._join_node(channel, join)

    def _join_node(self, channel: AuthenticatedChannel, join: nodes.JoinNode) -> bool:
        rank, config = join.rank, self._config
        refused = refusal(self._own, join)
        node = ConnectedNode(rank, channel)
        with self._lock:
            there = self.nodes.get(rank)
            if refused is None and there is not None:
                refused = nodes.Refused(
                    f"{there.name} is connected already", "give each node a --node-rank of its own"
                )
            if refused is None and not 0 < rank < config.nnodes:
                refused = nodes.Refused(f"there is no node {rank}", "change --node-rank")
            if self._closed.is_set():
                return False
            if refused is None:
                self.nodes[rank] = node
        if refused is not None:
            return self._refuse(channel, refused)
        own = range(rank * config.local_processes, (rank + 1) * config.local_processes)
        log.info("%s has joined: %s", node.name, ", ".join(map(config.process_name, own)))
        try:
            channel.send(nodes.encode_node_message(nodes.Admitted(self._run, list(own))))
        except OSError:  # it is gone already, and may come again
            with self._lock:
                del self.nodes[rank]
            raise
        return True

    def _join_process(self, channel: AuthenticatedChannel, join: nodes.JoinProcess) -> bool:
        config, number = self._config, join.process
        if join.run != self._run or join.channel not in ("commands", "events"):
            return False
        if not config.local_processes <= number < config.num_processes:
            return False
        with self._lock:
            node = self.nodes.get(config.node_of(number))
            half = self._halves.setdefault(number, {})
            if node is None or join.channel in half or self._closed.is_set():
                return False
            half[join.channel] = channel
            complete = len(half) == 2
        if complete:
            half["events"].set_timeout(_EVENT_SECONDS)
            self._on_process(
                RemoteShardProcess(
                    number, config.process_name(number), half["commands"], half["events"], node
                )
            )
        return True

    def _refuse(self, channel: AuthenticatedChannel, refused: nodes.Refused) -> bool:
        log.error("a node at %s was refused: %s", channel.other_address, refused.cause)
        channel.send(nodes.encode_node_message(refused))
        return False
