"""A server of OpenAI's chats that answers by a script, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """One answer of the script.

    Attributes:
        status: HTTP status.
        body: JSON; or bytes, which are sent as an event stream.
        headers: further ones.
        cut: whether the connection breaks behind the body.
        meanwhile: called before the last piece of a stream is sent.
    """

    status: int = 200
    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    meanwhile: Callable[[], object] = lambda: None


def event(**fields: Any) -> bytes:
    """An event of a stream."""
    return f"data: {json.dumps(fields)}\n\n".encode()


def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
    """An event with a part of the answer."""
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish_reason}])


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    """An event with the usage."""
    details = {"cached_tokens": cached}
    return event(
        choices=[],
        usage={
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": details,
        },
    )


DONE = b"data: [DONE]\n\n"


def text_reply(*pieces: str, finish_reason: str = "stop", **fields: Any) -> Reply:
    """An answer in pieces."""
    events = [delta(role="assistant", content=""), *(delta(content=piece) for piece in pieces)]
    events += [delta(finish_reason), usage(40, 8, 32), DONE]
    return Reply(body=b"".join(events), **fields)


def error_reply(status: int, message: str, **headers: str) -> Reply:
    """An error in OpenAI's form."""
    return Reply(status, {"error": {"message": message, "type": "x"}}, headers)


@dataclass
class ChatServer:
    """The server.

    Attributes:
        script: the answers to come, of which the last is repeated.
        cards: its models; None: it lists none.
        loading: answers to the first requests for its models.
        key: the API key that it requires; empty: none.
        prefix: of its routes.
        requests: bodies of the requests for answers.
        authorizations: the headers of all requests.
    """

    script: list[Reply] = field(default_factory=list)
    cards: list[dict[str, Any]] | None = field(default_factory=lambda: [{"id": "acme/chat"}])
    loading: list[Reply] = field(default_factory=list)
    key: str = ""
    prefix: str = "/v1"
    requests: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    url: str = ""

    @contextlib.contextmanager
    def serving(self) -> Iterator[ChatServer]:
        """It listens on a free port of 127.0.0.1 until the end of the block."""
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                script.authorizations.append(self.headers["authorization"])
                if script.key and self.headers["authorization"] != f"Bearer {script.key}":
                    self._send(error_reply(401, "no such key"))
                elif self.path == f"{script.prefix}/models" and script.loading:
                    self._send(script.loading.pop(0))
                elif self.path == f"{script.prefix}/models" and script.cards is not None:
                    self._send(Reply(200, {"object": "list", "data": script.cards}))
                elif self.path.partition("?")[0] == "/image.png":
                    self._send(Reply(200, PNG))
                else:
                    self._send(error_reply(404, "nothing there"))

            def do_POST(self) -> None:
                script.authorizations.append(self.headers["authorization"])
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path != f"{script.prefix}/chat/completions":
                    self._send(error_reply(404, "nothing there"))
                    return
                script.requests.append(body)
                self._send(script.script.pop(0) if len(script.script) > 1 else script.script[0])

            def _send(self, reply: Reply) -> None:
                stream = isinstance(reply.body, bytes)
                body = reply.body if stream else json.dumps(reply.body).encode()
                self.send_response(reply.status)
                kind = "text/event-stream" if stream else "application/json"
                headers = {"content-type": kind, **reply.headers}
                headers["content-length"] = str(len(body) + reply.cut)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    pieces = body.split(b"\n\n")
                    for index, piece in enumerate(pieces):
                        if stream and index == len(pieces) - 2:
                            reply.meanwhile()
                        self.wfile.write(piece + b"\n\n" * (index + 1 < len(pieces)))
                        self.wfile.flush()

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)
