"""Runs the calls of one client against a server; imports nothing that an environment could lack.

A script registers its calls with :func:`call` and ends with :func:`main`, which makes every call
with every kind of client (say, the synchronous and the asynchronous one), prints one line of JSON
for each and exits with 1 if any failed.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

Call = Callable[[Any], Awaitable[None]]

CALLS: list[Call] = []
SECONDS = 60.0
MESSAGES = [{"role": "user", "content": "What does os.path.join do?"}]
PROMPT = "def read_json(path):"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["join", "split"]},
        "arguments": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
TOOL = {"name": "look_up", "description": "Looks a function up.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL}]


def call(function: Call) -> Call:
    """Register a call: a coroutine function of a client, which asserts what it gets."""
    CALLS.append(function)
    return function


async def whole(answer: Any) -> Any:
    """What a method of either kind of client returned."""
    return await answer if inspect.isawaitable(answer) else answer


async def items(answer: Any) -> list[Any]:
    """All that a stream of either kind of client yields."""
    stream = await whole(answer)
    if inspect.isawaitable(answer) or not hasattr(stream, "__iter__"):  # some have both
        return [item async for item in stream]
    return list(stream)


def fits(text: str) -> None:
    """Assert that a text is JSON of :data:`SCHEMA`."""
    value = json.loads(text)
    assert list(value) == ["name", "arguments"]
    assert value["name"] in ("join", "split")
    assert isinstance(value["arguments"], int)
    assert 0 <= value["arguments"] <= 9


def call_of(identity: str, arguments: str) -> dict[str, Any]:
    """A call of :data:`TOOL` as a part of an assistant's message."""
    function = {"name": TOOL["name"], "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


async def raises(kind: type[BaseException], words: str, answer: Callable[[], Any]) -> Any:
    """The exception that a call raises, which must be of a kind and have these words."""
    try:
        await whole(answer())
    except kind as error:
        if words not in str(error):
            raise AssertionError(f"{words!r} is not in what it says") from error
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def _stay_here(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse every connection that leaves this machine: a client has no business there."""
    if event != "socket.connect" or not isinstance(arguments[1], tuple):
        return
    host = arguments[1][0]
    try:
        here = ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        here = host == "localhost"
    if not here:
        raise ConnectionRefusedError(f"a client wants to connect to {host}")


async def _run(clients: dict[str, Callable[[str], Any]], url: str) -> bool:
    passed = True
    results, sys.stdout = sys.stdout, sys.stderr  # where some clients say what they think
    for function in CALLS:
        for kind, make in clients.items():
            failure = None
            try:
                await asyncio.wait_for(function(make(url)), SECONDS)
            except Exception:  # whatever a client raises is the result, and the next call is made
                failure = traceback.format_exc()
                passed = False
            line = {"call": f"{kind} {function.__name__}", "failure": failure}
            print(json.dumps(line), file=results, flush=True)
    return passed


def main(clients: dict[str, Callable[[str], Any]]) -> None:
    """Make every call; ``clients`` makes a client of each kind from the server's URL."""
    sys.addaudithook(_stay_here)
    sys.exit(0 if asyncio.run(_run(clients, sys.argv[1])) else 1)
