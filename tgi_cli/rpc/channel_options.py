"""gRPC channel arguments of both ends.

On one machine a dead process closes its socket, and a hung one is detected by its heartbeat
(:mod:`tgi_cli.process.heartbeat`, :mod:`tgi_cli.rpc.engine_watch`). There pings would only end
connections to processes that a busy machine delays, so they are off. Across machines only a ping
detects a peer that has disappeared.
"""

from __future__ import annotations

NEVER_MS = (1 << 31) - 1
"""gRPC never sets such a timer."""

PING_AFTER_MS = 30_000
"""Idle time before a ping, across machines."""
PING_TIMEOUT_MS = 30_000
"""Time for the answer: a machine under load takes seconds."""

_COMMON = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)

_PATIENT = (
    ("grpc.keepalive_time_ms", NEVER_MS),
    # Applies to all pings, also those that measure the connection.
    ("grpc.http2.ping_timeout_ms", NEVER_MS),
)

_PINGING = (
    ("grpc.keepalive_time_ms", PING_AFTER_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    # While a measuring ping has no answer, no keepalive ping is sent.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    # Also while nothing is generated.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

_SERVER = (
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
)

SERVER = [*_SERVER, *_PATIENT]
"""Options of a server on a unix socket only."""
TCP_SERVER = [*_SERVER, *_PINGING]
"""For a server on TCP: it detects that a router, its machine or the network has failed, and ends
its requests. Local clients are pinged too, as a server has one set of arguments."""

_CLIENT = (
    *_COMMON,
    # The other end may still be loading its model: retry soon.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    # The connection between the two halves of a server needs no proxy.
    ("grpc.enable_http_proxy", 0),
)

CLIENT = [*_CLIENT, *_PATIENT, ("grpc.min_reconnect_backoff_ms", 50)]
"""Options of a client of a unix socket."""
TCP_CLIENT = [
    *_CLIENT,
    *_PINGING,
    # Despite its name this also bounds the time for connecting and the TLS handshake.
    ("grpc.min_reconnect_backoff_ms", 5_000),
]
"""Options of a client of a model server on another machine."""
