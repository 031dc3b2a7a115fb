"""What runs on a node besides node 0: joins it, and starts and ends this node's processes.

Node 0 decides what they load. When its model server ends, for whatever reason, the processes end,
and the node joins the next one.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from tgi_cli.config import ServeConfig
from tgi_cli.errors import ConfigError
from tgi_cli.process.authenticated_channel import (
    AuthenticatedChannel,
    AuthenticationError,
    connect,
)
from tgi_cli.process.bind import format_address
from tgi_cli.process.spawn import child_environment, module_command, write_config
from tgi_cli.worker.tensor_parallel.node_identity import describe_node
from tgi_cli.worker.tensor_parallel.node_messages import (
    Admitted,
    ProcessEnded,
    Refused,
    decode_answer,
    encode_node_message,
)
from tgi_cli.worker.tensor_parallel.process_link import CONNECT_SECONDS, ProcessLink

log = logging.getLogger(__name__)

_COMMAND = module_command("tgi_cli.worker.tensor_parallel.main")
_RETRY_SECONDS = 1.0
_WAITING_SECONDS = 30.0
"""Time between messages that node 0 cannot be reached."""
_SILENCE_SECONDS = 30.0
"""Without a message of node 0, which pings every second, its machine is taken for lost."""
_END_SECONDS = 2.0
"""Time limit for the processes to end before they are killed."""


class NodeAgent:
    """Runs the processes of this node, until :meth:`stop`.

    Args:
        serve: the settings.
        model_path: the model's folder on this node.
        secret: by which the nodes authenticate each other.
        variables: environment variables of the processes besides this process's.
    """

    def __init__(
        self,
        serve: ServeConfig,
        model_path: Path,
        secret: bytes,
        variables: dict[str, str] | None = None,
    ) -> None:
        self._host, self._port = serve.master_addr, serve.master_port
        self._secret = secret
        self._model_path = model_path
        self._join = describe_node(serve, model_path)
        self._variables = variables or {}
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._channel: AuthenticatedChannel | None = None

    def run(self) -> None:
        """Serve one model server of node 0 after the other; returns after :meth:`stop`.

        Raises:
            ConfigError: node 0 refuses this node, or does not know the secret.
        """
        while (channel := self._connect()) is not None:
            try:
                self._serve(channel)
            finally:
                with self._lock:
                    self._channel = None
                channel.close()
            if not self._stopped.is_set():
                log.info("node 0 has ended its model server; waiting for the next one")
                self._stopped.wait(_RETRY_SECONDS)

    def stop(self) -> None:
        """End the processes, and :meth:`run`; from any thread."""
        self._stopped.set()
        with self._lock:
            if self._channel is not None:
                self._channel.shut()

    def _connect(self) -> AuthenticatedChannel | None:
        """Connect to node 0 as soon as it listens; None after :meth:`stop`."""
        address = format_address(self._host, self._port)
        due = time.monotonic()
        while not self._stopped.is_set():
            try:
                channel = connect(self._host, self._port, self._secret, CONNECT_SECONDS)
            except AuthenticationError as error:
                raise ConfigError(
                    f"node 0 at {address}: {error}",
                    "check --master-addr and --master-port, and that --node-secret-file is the "
                    "same on all nodes",
                ) from error
            except (OSError, UnicodeError) as error:
                if time.monotonic() >= due:
                    due = time.monotonic() + _WAITING_SECONDS
                    log.info("waiting for node 0 at %s: %s", address, error)
                self._stopped.wait(_RETRY_SECONDS)
                continue
            with self._lock:
                self._channel = channel
            if not self._stopped.is_set():
                return channel
        return None

    def _serve(self, channel: AuthenticatedChannel) -> None:
        """Join, start the processes, and end them when node 0 is gone."""
        processes: list[subprocess.Popen[bytes]] = []
        channel.set_timeout(_SILENCE_SECONDS)
        try:
            channel.send(encode_node_message(self._join))
            while (message := channel.receive()) is not None:
                answer = decode_answer(message)
                if isinstance(answer, Refused):
                    raise ConfigError(f"node 0 refuses this node: {answer.cause}", answer.remedy)
                if isinstance(answer, Admitted):
                    log.info("joined node 0: starting %d processes", len(answer.processes))
                    try:
                        for number in answer.processes:
                            processes.append(self._start(answer.run, number, channel))
                    except OSError as error:
                        log.error("the processes of this node cannot be started: %s", error)
                        return
                else:
                    channel.send(message)
        except TimeoutError:
            log.error("node 0 has not been heard of for %g s", _SILENCE_SECONDS)
        except (OSError, ValueError) as error:
            log.error("the connection to node 0 has failed: %s", error)
        finally:
            channel.shut()
            _end(processes)

    def _start(
        self, run: str, number: int, channel: AuthenticatedChannel
    ) -> subprocess.Popen[bytes]:
        """Start a process, whose end is reported to node 0."""
        link = ProcessLink(self._host, self._port, self._secret, run, number, self._model_path)
        fd = write_config(link)
        try:
            process = subprocess.Popen(
                [*_COMMAND, str(fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=[fd],
                env=child_environment() | self._variables,
            )
        finally:
            os.close(fd)

        def report() -> None:
            status = process.wait()
            with suppress(OSError):
                channel.send(encode_node_message(ProcessEnded(number, status)))

        threading.Thread(target=report, name=f"wait for {number}", daemon=True).start()
        return process


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for the processes, which end with their connections, and kill those that do not."""
    end = time.monotonic() + _END_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
