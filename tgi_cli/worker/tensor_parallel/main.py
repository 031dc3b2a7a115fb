"""The process of another shard or stage: executes commands of shard 0 until shard 0 is gone.

Started by :mod:`tgi_cli.worker.tensor_parallel.group` with two inherited sockets, or on another
node by :mod:`tgi_cli.worker.tensor_parallel.node_agent`, to connect two itself. The main thread
executes commands; another answers pings from the start. Signals that end a service are shard 0's to
handle: this process ends when its sockets close, for whatever reason.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from tgi_cli.errors import ExitCode, TgiError
from tgi_cli.logging import dump_on_signal, setup
from tgi_cli.process.framing import Channel
from tgi_cli.process.minimal_torch import import_minimal_torch
from tgi_cli.process.spawn import read_config
from tgi_cli.worker.tensor_parallel import messages
from tgi_cli.worker.tensor_parallel.process_link import ProcessLink

if TYPE_CHECKING:
    from tgi_cli.config import EngineConfig
    from tgi_cli.worker.tensor_parallel.stores import RemoteStore
    from tgi_cli.worker.worker import ModelWorker

log = logging.getLogger(__name__)

_FAILURE_DELAY = 1.0
"""Seconds before a failed operation is reported: most fail because another shard has ended, and
then shard 0 ends this one first."""

_PING_TIMEOUT = 5.0
"""Seconds without a ping after which the parent process is checked."""


def main() -> NoReturn:
    """``python -m tgi_cli.worker.tensor_parallel.main COMMANDS_FD EVENTS_FD``, or ``LINK_FD``.

    ``LINK_FD`` has a :class:`ProcessLink`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    commands: Channel
    events: Channel
    host = ""
    link = None
    if len(sys.argv) == 2:
        link = read_config(int(sys.argv[1]), ProcessLink)
        commands, events = link.connect("commands"), link.connect("events")
        host = commands.own_address
    else:
        commands, events = (Channel(socket.socket(fileno=int(fd))) for fd in sys.argv[1:3])
    first = commands.receive()
    if first is None:
        os._exit(ExitCode.OK)
    assignment = messages.decode_assignment(first)
    config = assignment.config
    if link is not None:
        config = replace(config, model_path=link.model_path)
    setup(config.process_name(assignment.process), assignment.log_level, config.json_output)
    dump_on_signal()
    receiver = _EventReceiver(events)
    try:
        worker = _load(config, assignment.process, receiver, host)
        while (command := commands.receive()) is not None:
            _execute(messages.decode_command(command), worker, events)
    except TgiError as error:
        _fail(events, messages.Failed(type(error).__name__, error.cause, error.remedy))
    except Exception as error:  # a defect, or the end of another shard
        time.sleep(_FAILURE_DELAY)
        log.exception("a step failed")
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        _fail(events, messages.Failed("", cause, ""))
    # Not sys.exit: threads of torch's process groups may still wait for the others.
    os._exit(ExitCode.OK)


def _load(config: EngineConfig, number: int, receiver: _EventReceiver, host: str) -> ModelWorker:
    """Load, connect and warm up, as shard 0 does."""
    import_minimal_torch()
    from tgi_cli.device.distributed import LOOPBACK, Shard, device_of
    from tgi_cli.worker.factory import make_worker
    from tgi_cli.worker.tensor_parallel.group import CONNECT_SECONDS, START_SECONDS
    from tgi_cli.worker.tensor_parallel.stores import RemoteStore

    device = device_of(config.device, config.device_index(number))
    stages = config.pipeline_parallel_size
    shard = Shard.of_process(number, config.num_shard, stages, device, config.nnodes)
    worker = make_worker(config, shard)
    store = receiver.store = RemoteStore(receiver.events)
    receiver.events.send(messages.encode(messages.Loaded()))
    shard.connect(store, CONNECT_SECONDS, host or LOOPBACK)
    shard.set_timeout(START_SECONDS)
    worker.warmup()
    return worker


def _execute(command: messages.Command, worker: ModelWorker, events: Channel) -> None:
    if isinstance(command, messages.RunStep):
        worker.sample(worker.launch(command.step))
    elif isinstance(command, messages.PrepareAdapter):
        adapter_id = command.adapter_id

        def answer(done: Future[None]) -> None:
            error = done.exception()
            event = messages.AdapterPrepared(adapter_id)
            if isinstance(error, TgiError):
                event = messages.AdapterPrepared(adapter_id, error.cause, error.remedy)
            elif error is not None:
                event = messages.AdapterPrepared(adapter_id, f"{type(error).__name__}: {error}")
            events.send(messages.encode(event))

        worker.prepare_adapter(adapter_id, command.name, command.path).add_done_callback(answer)
    else:
        worker.forget_adapter(command.adapter_id)


class _EventReceiver:
    """Receives what shard 0 sends at any time, in a thread.

    Attributes:
        events: the channel.
        store: takes the values that come on it.
    """

    def __init__(self, events: Channel) -> None:
        self.events = events
        self.store: RemoteStore | None = None
        threading.Thread(target=self._receive_all, name="events", daemon=True).start()

    def _receive_all(self) -> None:
        """Send pings back; end the process when shard 0 has closed the channel, or died.

        A process that shard 0 has forked may hold the channel open: then the parent has changed.
        """
        parent = os.getppid()
        try:
            while True:
                while not select.select([self.events], [], [], _PING_TIMEOUT)[0]:
                    if os.getppid() != parent:
                        raise ConnectionError
                message = self.events.receive()
                if message is None:
                    break
                event = messages.decode_event(message)
                if isinstance(event, messages.StoreValue):
                    assert self.store is not None
                    self.store.put(event.key, event.value)
                else:
                    self.events.send(message)
        except (OSError, ValueError):
            log.debug("shard 0 is gone")
        os._exit(ExitCode.OK)


def _fail(events: Channel, failed: messages.Failed) -> NoReturn:
    try:
        events.send(messages.encode(failed))
    except OSError:
        log.debug("shard 0 is gone")
    os._exit(ExitCode.SHARD_FAILED)


if __name__ == "__main__":
    main()
