"""Signals as events, for processes whose main thread blocks.

Python runs a signal's handler in the main thread between two bytecodes: a signal that arrives just
before that thread blocks on a lock is handled once the lock is released. The C-level handler writes
the number to the wakeup descriptor at once, where a thread reads it.
https://docs.python.org/3/library/signal.html#signal.set_wakeup_fd
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator


@contextlib.contextmanager
def delivered(
    numbers: Collection[signal.Signals], deliver: Callable[[signal.Signals], None]
) -> Iterator[None]:
    """Call ``deliver`` for each of these signals, in a thread, instead of their handlers.

    Enter it in the main thread.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    before = {number: signal.signal(number, _nothing) for number in numbers}
    wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)

    def read() -> None:
        with reading:
            while received := reading.recv(64):
                for number in numbers:
                    if number in received:
                        deliver(number)

    threading.Thread(target=read, name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writing.close()


@contextlib.contextmanager
def exiting_on(*numbers: signal.Signals) -> Iterator[None]:
    """Exit with status 0 on one of these signals, while there is nothing to finish."""
    before = {number: signal.signal(number, lambda *_: sys.exit(0)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nothing(_number: int, _frame: object) -> None:
    """Replaces the default action; the thread does the rest."""
