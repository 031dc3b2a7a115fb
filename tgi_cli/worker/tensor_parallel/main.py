"""The process of another shard or stage: executes commands of shard 0 until shard 0 is gone.

Started by :mod:`tgi_cli.worker.tensor_parallel.group` with two inherited sockets. The main thread
executes commands; another answers pings from the start. Signals that end a service are shard 0's
to handle: this process ends when its sockets close, for whatever reason.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tgi_cli.errors import ExitCode, TgiError
from tgi_cli.logging import dump_on_signal, setup
from tgi_cli.process.framing import Channel
from tgi_cli.worker.tensor_parallel import messages

if TYPE_CHECKING:
    from tgi_cli.worker.worker import ModelWorker

log = logging.getLogger(__name__)

_FAILURE_DELAY = 1.0
"""Seconds before a failed operation is reported: most fail because another shard has ended, and
then shard 0 ends this one first."""

_PING_TIMEOUT = 5.0
"""Seconds without a ping after which the parent process is checked."""


def main() -> NoReturn:
    """``python -m tgi_cli.worker.tensor_parallel.main COMMANDS_FD EVENTS_FD``."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    commands, events = (Channel(socket.socket(fileno=int(fd))) for fd in sys.argv[1:3])
    first = commands.receive()
    if first is None:
        os._exit(ExitCode.OK)
    assignment = messages.decode_assignment(first)
    config = assignment.config
    setup(config.process_name(assignment.process), assignment.log_level, config.json_output)
    dump_on_signal()
    folder = Path(assignment.folder)
    threading.Thread(target=_answer, args=(events, folder), name="events", daemon=True).start()
    try:
        worker = _load(assignment, folder, events)
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


def _load(assignment: messages.ShardAssignment, folder: Path, events: Channel) -> ModelWorker:
    """Load, connect and warm up, as shard 0 does."""
    from tgi_cli.device.distributed import Shard, device_of
    from tgi_cli.worker.factory import make_worker
    from tgi_cli.worker.tensor_parallel.group import CONNECT_SECONDS, START_SECONDS

    config = assignment.config
    device = device_of(config.device, assignment.process)
    stages = config.pipeline_parallel_size
    shard = Shard.of_process(assignment.process, config.num_shard, stages, device)
    worker = make_worker(config, shard)
    events.send(messages.encode(messages.Loaded()))
    shard.connect(folder, CONNECT_SECONDS)
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


def _answer(events: Channel, folder: Path) -> None:
    """Send pings back; end the process when shard 0 has closed the channel, or died.

    A process that shard 0 has forked may hold the channel open: then the parent has changed.
    """
    parent = os.getppid()
    try:
        while True:
            while not select.select([events], [], [], _PING_TIMEOUT)[0]:
                if os.getppid() != parent:
                    raise ConnectionError
            ping = events.receive()
            if ping is None:
                break
            events.send(ping)
    except OSError:
        log.debug("shard 0 is gone")
    shutil.rmtree(folder, ignore_errors=True)  # shard 0 removes it otherwise
    os._exit(ExitCode.OK)


def _fail(events: Channel, failed: messages.Failed) -> NoReturn:
    try:
        events.send(messages.encode(failed))
    except OSError:
        log.debug("shard 0 is gone")
    os._exit(ExitCode.SHARD_FAILED)


if __name__ == "__main__":
    main()
