"""Messages between processes arrive whole, however their bytes are cut."""

from __future__ import annotations

import io
import socket
import threading
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from tgi_cli.process.framing import (
    Channel,
    FrameDecoder,
    encode_frame,
    frame_parts,
    read_frame,
    size_of,
    split_frame,
)


@given(st.lists(st.binary(max_size=300), max_size=20), st.integers(1, 500))
def test_messages_arrive_whole_however_they_are_cut(messages: list[bytes], size: int) -> None:
    data = b"".join(map(encode_frame, messages))
    decoder = FrameDecoder()
    found = []
    for start in range(0, len(data), size):
        found += decoder.feed(data[start : start + size])
    assert found == messages


def test_a_stream_ends_with_its_last_whole_message() -> None:
    stream = io.BytesIO(encode_frame(b"one") + encode_frame(b"") + encode_frame(b"three")[:-1])
    assert [read_frame(stream) for _ in range(4)] == [b"one", b"", None, None]


def test_a_channel_reports_the_end_of_the_other_side() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    ours.send(b"hello")
    assert theirs.receive() == b"hello"
    ours.shut()
    ours.shut()
    assert theirs.receive() is None
    ours.close()
    theirs.close()


def test_a_length_alone_takes_no_memory() -> None:
    """It may be one that a stranger on the way has changed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff\xff\xff\xff" + b"x" * 1000)
        theirs.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        try:
            assert Channel(ours).receive() is None
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 8 << 20


def test_long_messages_arrive_in_parts() -> None:
    ours, theirs = socket.socketpair()
    message = bytes(range(256)) * 12_001  # 3 MB
    with ours, theirs:
        sending = threading.Thread(target=Channel(theirs).send, args=(message,))
        sending.start()
        assert Channel(ours).receive() == message
        sending.join()


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_a_frame_is_split_from_what_follows_it(message: bytes, rest: bytes) -> None:
    frame = encode_frame(message)
    assert split_frame(bytearray(frame + rest)) == (message, rest)
    for end in range(len(frame)):
        assert split_frame(bytearray(frame[:end])) is None


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_a_message_in_parts_is_framed_as_a_whole(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    assert b"".join(frame_parts(parts)) == b"".join(frame_parts(whole)) == encode_frame(whole)
    assert size_of(parts) == size_of(whole) == len(whole)
