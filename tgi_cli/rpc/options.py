"""gRPC channel arguments of both ends."""

from __future__ import annotations

_COMMON = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # For any ping, also those that measure the connection: while one of them has no answer, none
    # is sent to see whether the other end is there.
    ("grpc.http2.ping_timeout_ms", 15_000),
)

SERVER = [
    *_COMMON,
    # A client may ask "are you there" while nothing is generated.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # A router that is gone without a word, as with its machine or the cable between, is noticed
    # too, and what it asked for ends.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.so_reuseport", 0),
]

CLIENT = [
    *_COMMON,
    # A process that is stopped or a machine that is gone is noticed after 15 s at most; one that
    # died is noticed at once, its socket closes.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The other end may still be loading its model: look again soon.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    # No proxy has a say between the two halves of a server.
    ("grpc.enable_http_proxy", 0),
]

TCP_CLIENT = [
    # The name is of what it bounds as well: the time that a connection and its TLS may take.
    ("grpc.min_reconnect_backoff_ms", 5_000),
]
"""In place of the above, where the model server may be far away."""
