"""gRPC channel arguments of both ends.

On one machine a dead process closes its socket, and a hung one is detected by its heartbeat
(:mod:`tgi_cli.process.heartbeat`, :mod:`tgi_cli.rpc.engine_watch`). A ping would add nothing but an
end to a peer that a crowded machine lets wait: none has to be answered. Across machines only a ping
notices a peer that is gone without a word.
"""

from __future__ import annotations

NEVER_MS = (1 << 31) - 1
"""gRPC's own: such a timer is never set."""

PING_AFTER_MS = 30_000
"""Of silence, across machines."""
PING_TIMEOUT_MS = 30_000
"""For the answer: a machine under load takes seconds."""

_COMMON = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)

_PATIENT = (
    ("grpc.keepalive_time_ms", NEVER_MS),
    # For any ping, also those that measure the connection.
    ("grpc.http2.ping_timeout_ms", NEVER_MS),
)

_PINGING = (
    ("grpc.keepalive_time_ms", PING_AFTER_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    # While a ping that measures has no answer, none is sent to see whether the other end is there.
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
"""On a unix socket alone."""
TCP_SERVER = [*_SERVER, *_PINGING]
"""A router that is gone, as with its machine or the cable between, is noticed, and what it asked
for ends. Its own machine's clients are pinged, too: a server has one set of arguments."""

_CLIENT = (
    *_COMMON,
    # The other end may still be loading its model: look again soon.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    # No proxy has a say between the two halves of a server.
    ("grpc.enable_http_proxy", 0),
)

CLIENT = [*_CLIENT, *_PATIENT, ("grpc.min_reconnect_backoff_ms", 50)]
"""To a unix socket."""
TCP_CLIENT = [
    *_CLIENT,
    *_PINGING,
    # The name is of what it bounds as well: the time that a connection and its TLS may take.
    ("grpc.min_reconnect_backoff_ms", 5_000),
]
"""To a model server that may be far away."""
