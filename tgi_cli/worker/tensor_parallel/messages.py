"""Messages between shard 0 and the other shards of a model: msgpack, never pickle.

Each shard has two channels: commands, which all shards execute in the same order, and events,
which go both ways at any time. They are pairs of sockets on one machine, and authenticated
connections between machines (:mod:`tgi_cli.worker.tensor_parallel.node_messages`). https://jcristharif.com/msgspec/
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from tgi_cli.config import EngineConfig
from tgi_cli.engine.image_slices import EncodeSlice
from tgi_cli.engine.step import NO_EXTRAS, NewRow, Step


class ShardAssignment(msgspec.Struct, frozen=True, array_like=True):
    """The first message: what to load, as which process (:meth:`Shard.of_process`)."""

    process: int
    config: EngineConfig
    log_level: str


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Compute a step together."""

    step: Step


class PrepareAdapter(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """See :meth:`tgi_cli.engine.step.AdapterStore.prepare_adapter`."""

    adapter_id: int
    name: str
    path: str


class ForgetAdapter(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """See :meth:`tgi_cli.engine.step.AdapterStore.forget_adapter`."""

    adapter_id: int


Command = RunStep | PrepareAdapter | ForgetAdapter


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Sent by shard 0; a live shard sends it back."""


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The shard has loaded its weights, and is about to connect."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The shard ends. ``kind`` is a class of :mod:`tgi_cli.errors`; empty for a defect."""

    kind: str
    cause: str
    remedy: str


class AdapterPrepared(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The shard has read an adapter, or could not, for the reason in ``cause``."""

    adapter_id: int
    cause: str = ""
    remedy: str = ""


class StoreSet(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A value for the processes' store (:mod:`tgi_cli.worker.tensor_parallel.stores`)."""

    key: str
    value: bytes


class StoreGet(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The shard asks shard 0 for a value."""

    key: str


class StoreValue(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The answer, once there is such a value."""

    key: str
    value: bytes


Event = Ping | Loaded | Failed | AdapterPrepared | StoreSet | StoreGet | StoreValue


def _convert(kind: type, value: Any) -> Any:
    return kind(value)


def _form(value: Any) -> Any:
    """What stands for a value that msgpack has no form for: an array, or a path."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return str(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_form)
_assignment_decoder = msgspec.msgpack.Decoder(ShardAssignment, dec_hook=_convert)
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)

# They raise msgspec.DecodeError for invalid messages.
decode_assignment = _assignment_decoder.decode
decode_event = _event_decoder.decode


def decode_command(data: bytes | memoryview) -> Command:
    """Decode a command, the arrays of images included. Raises as the others."""
    command = _command_decoder.decode(data)
    if isinstance(command, RunStep):
        command.step.encodes = [_with_arrays(part) for part in command.step.encodes]
    return command


def _with_arrays(part: EncodeSlice) -> EncodeSlice:
    if part.tensors is None:
        return part
    arrays = {
        name: np.frombuffer(data, dtype).reshape(shape)
        for name, (dtype, shape, data) in part.tensors.items()
    }
    return replace(part, tensors=arrays)


def encode(message: ShardAssignment | Command | Event) -> bytes:
    """Encode a message. A step is sent without fields that only sampling needs."""
    if isinstance(message, RunStep) and message.step.new:
        message = RunStep(replace(message.step, new=[_plain(new) for new in message.step.new]))
    return _encoder.encode(message)


def _plain(new: NewRow) -> NewRow:
    """A new row without callables and without what only shard 0 reports.

    Shard 0 alone samples, and sends the tokens to the others. These need only the options for
    which more logits are computed.
    """
    extras = new.extras
    if extras is NO_EXTRAS:
        return new
    return replace(
        new, extras=replace(extras, logits_processors=(), return_generation_logits=False)
    )
