"""What all tests rely on."""

from __future__ import annotations

import signal

from hypothesis import settings

# A shell that starts a test run in the background lets it ignore Ctrl-C, and a process hands
# that on to its children: tests of Ctrl-C would then test nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("untimed", deadline=None)  # how busy the machine is says nothing of us
settings.load_profile("untimed")
