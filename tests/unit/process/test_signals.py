"""A signal is seen whatever the main thread is doing."""

from __future__ import annotations

import os
import signal
from queue import SimpleQueue

from tgi_cli.process.signals import delivered


def test_signals_are_delivered_while_the_main_thread_blocks() -> None:
    seen: SimpleQueue[signal.Signals] = SimpleQueue()
    before = signal.getsignal(signal.SIGUSR1)
    with delivered((signal.SIGUSR1, signal.SIGUSR2), seen.put):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen.get(timeout=60) is signal.SIGUSR1
        os.kill(os.getpid(), signal.SIGUSR2)
        assert seen.get(timeout=60) is signal.SIGUSR2
    assert signal.getsignal(signal.SIGUSR1) is before
    assert signal.set_wakeup_fd(-1) == -1
