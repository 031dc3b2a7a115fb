"""What goes over the wire between shards arrives as it was sent."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.config.test_resolve import resolved
from tgi_cli.engine.image_slices import EncodeSlice, ImageSpan
from tgi_cli.engine.step import (
    BlockAppend,
    NewRow,
    OptionalOutputs,
    RowImage,
    Snapshot,
    Step,
    TokenAppend,
)
from tgi_cli.process.framing import Channel
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.tensor_parallel import messages

small = st.integers(0, 2**31 - 1)
ids = st.lists(small, max_size=40)
share = st.floats(0.01, 1.0)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0.0, 100.0),
    top_k=small,
    top_p=share,
    min_p=st.floats(0.0, 1.0),
    typical_p=share,
    repetition_penalty=st.floats(0.01, 10.0),
    frequency_penalty=st.floats(-2.0, 2.0),
    seed=st.integers(0, 2**64 - 1),
    top_logprobs=st.integers(0, 20),
    logit_bias=st.lists(st.tuples(small, st.floats(-100.0, 100.0)), max_size=3).map(tuple),
    bad_words=st.lists(st.lists(small, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    min_new_tokens=small,
    watermark=st.booleans(),
    allowed_token_ids=st.lists(small, max_size=3).map(tuple),
)
extras = st.builds(
    OptionalOutputs,
    stop_token_ids=st.frozensets(small, max_size=3),
    prompt_logprobs=st.none() | st.integers(0, 20),
    client_id=st.none() | small,
    return_context_logits=st.booleans(),
)
new_rows = st.builds(
    NewRow,
    row=small,
    request_id=st.integers(0, 2**64 - 1),
    token_ids=ids,
    prompt_tokens=small,
    block_ids=ids,
    sampling=samplings,
    extras=extras,
    adapter_slot=st.integers(-1, 100),
    images=st.lists(
        st.builds(
            RowImage,
            spans=st.lists(st.tuples(small, small), max_size=3).map(tuple),
            grid=st.none() | st.tuples(small, small),
            bidirectional=st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
)
steps = st.builds(
    Step,
    step_id=small,
    freed=ids,
    new=st.lists(new_rows, max_size=4),
    forced_tokens=st.lists(
        st.builds(TokenAppend, row=small, start=small, token_ids=ids), max_size=4
    ),
    drafts=st.lists(st.builds(TokenAppend, row=small, start=small, token_ids=ids), max_size=4),
    appended=st.lists(st.builds(BlockAppend, row=small, start=small, block_ids=ids), max_size=4),
    copies=st.lists(st.tuples(small, small), max_size=3),
    adapters=st.lists(st.tuples(small, small), max_size=3),
    rows=ids,
    starts=ids,
    counts=ids,
    samples=st.lists(st.integers(0, 9), max_size=40),
    state_in=st.lists(st.integers(-1, 100), max_size=40),
    state_out=ids,
    snapshots=st.lists(st.builds(Snapshot, index=small, count=small, slot=small), max_size=3),
    dropped_images=ids,
    encodes=st.lists(
        st.builds(EncodeSlice, key=small, rows=small, layers=small, last=st.booleans()), max_size=3
    ),
    images=st.lists(
        st.builds(ImageSpan, index=small, offset=small, count=small, key=small, first=small),
        max_size=3,
    ),
    num_decodes=small,
    reads_logits=st.booleans(),
)


@given(steps)
def test_a_step_arrives_as_it_was_sent(step: Step) -> None:
    command = messages.decode_command(messages.encode(messages.RunStep(step)))
    assert isinstance(command, messages.RunStep)
    assert command.step == step
    assert all(isinstance(new, NewRow) for new in command.step.new)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3), (0, 5), ()])
def test_the_arrays_of_an_image_arrive_as_they_were_sent(
    dtype: type, shape: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    begun = EncodeSlice(3, 2, 1, True, {"pixel_values": array.T})
    step = Step(0, encodes=[begun, EncodeSlice(3, 2, 1, False)])
    command = messages.decode_command(messages.encode(messages.RunStep(step)))
    assert isinstance(command, messages.RunStep)
    first, second = command.step.encodes
    assert second == step.encodes[1]
    assert first.tensors is not None
    (arrived,) = first.tensors.values()
    assert arrived.dtype == dtype
    assert arrived.shape == array.T.shape
    np.testing.assert_array_equal(arrived, array.T)


def test_sampling_options_are_not_sent_to_other_shards() -> None:
    """Callables cannot be, and the step that is run here keeps them."""
    processors = (lambda *_: None,)
    asking = OptionalOutputs(
        prompt_logprobs=3, logits_processors=processors, return_generation_logits=True
    )
    new = NewRow(1, 2, [3], 1, [4], SamplingParams(), asking)
    step = Step(0, new=[new])
    command = messages.decode_command(messages.encode(messages.RunStep(step)))
    assert isinstance(command, messages.RunStep)
    (arrived,) = command.step.new
    assert arrived == replace(new, extras=OptionalOutputs(prompt_logprobs=3))
    assert step.new[0].extras.logits_processors is processors


def test_an_assignment_arrives_as_it_was_sent() -> None:
    config = resolved(num_shard=2, rope_scaling="linear", rope_factor=2.0)
    sent = messages.ShardAssignment(1, config, "INFO")
    got = messages.decode_assignment(messages.encode(sent))
    assert got == sent
    assert isinstance(got.config.model_path, Path)


@pytest.mark.parametrize(
    "message",
    [
        messages.Ping(),
        messages.Loaded(),
        messages.Failed("CheckpointError", "a", "b"),
        messages.AdapterPrepared(3, "it does not fit"),
    ],
)
def test_events_arrive_as_they_were_sent(message: messages.Event) -> None:
    assert messages.decode_event(messages.encode(message)) == message


def test_invalid_commands_are_refused() -> None:
    for data in (b"", b"\x00", msgspec.msgpack.encode([0, {"step_id": "x"}]), b"\xc1" * 8):
        with pytest.raises(msgspec.DecodeError):
            messages.decode_command(data)


def test_messages_of_any_size_come_whole_and_in_order() -> None:
    one, other = map(Channel, socket.socketpair())
    sent = [bytes([i]) * size for i, size in enumerate([0, 1, 5_000_000, 3])]

    def send() -> None:
        for message in sent:
            one.send(message)
        one.shut()

    thread = threading.Thread(target=send)
    thread.start()
    received = []
    while (message := other.receive()) is not None:
        received.append(message)
    thread.join(timeout=60)
    assert received == sent
    one.close()
    other.close()


def test_an_end_in_the_middle_of_a_message_is_the_end() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.sendall(b"\x10\x00\x00\x00half")
    theirs.close()
    assert channel.receive() is None
    channel.shut()
    channel.close()
