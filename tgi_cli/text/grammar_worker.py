"""The process that compiles grammars: ``python -m tgi_cli.text.grammar_worker``.

It may be killed at any time, and bounds itself: what a grammar costs is known only afterwards.
Messages are four bytes of length, most significant first, and JSON. The first to come in tells
the model's special tokens and the limits; each further one is a grammar's form, and is answered.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

HEAD = struct.Struct(">I")


def main() -> None:
    """Answer until the input ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    first = receive(source)
    if first is None:
        return
    from tgi_cli.text.grammar import GrammarError
    from tgi_cli.text.grammar_compile import Compiler
    from tgi_cli.text.grammar_tokens import SpecialTokens

    told = json.loads(first)
    compiler = Compiler(SpecialTokens(told["added"], told["special"], told["ends"]))
    compiler.compile(b'{"json": {"type": "object"}}')  # what is built once does not count
    bytes_now = _limit_memory(told["megabytes"])
    send(target, {"ready": True})
    # From here on, what the library says while it dies is no news: the router tells of it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    while (form := receive(source)) is not None:
        # Whoever waits for the answer kills the process before; unless it is gone itself.
        signal.setitimer(signal.ITIMER_REAL, told["seconds"] + 2)
        answer: dict[str, Any]
        try:
            answer = {"grammar": compiler.compile(form)}
        except GrammarError as error:
            answer = {"error": str(error)}
        except MemoryError:
            return
        except BaseException as error:  # among them, what the library makes of its own defects
            answer = {"error": f"{type(error).__name__}: {error}", "defect": True}
        signal.setitimer(signal.ITIMER_REAL, 0)
        # Memory that was used once is seldom given back.
        answer["last"] = "defect" in answer or _peak_bytes() > bytes_now + told["megabytes"] * (
            1 << 19
        )
        send(target, answer)
        if answer["last"]:
            return


def _limit_memory(megabytes: int) -> int:
    """Allow so much more than is used now; returns that."""
    peak = _peak_bytes()
    statm = Path("/proc/self/statm")
    if statm.exists():
        size = int(statm.read_text().split()[0]) * resource.getpagesize() + (megabytes << 20)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard == resource.RLIM_INFINITY or size < hard:
            resource.setrlimit(resource.RLIMIT_AS, (size, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return peak


def _peak_bytes() -> int:
    """The most memory that this process has had; getrusage's figure may be its parent's."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def receive(source: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    head = source.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (length,) = HEAD.unpack(head)
    body = source.read(length)
    return body if len(body) == length else None


def send(target: BinaryIO, message: Any) -> None:
    """Write one message."""
    body = json.dumps(message).encode()
    target.write(HEAD.pack(len(body)) + body)
    target.flush()


if __name__ == "__main__":
    main()
