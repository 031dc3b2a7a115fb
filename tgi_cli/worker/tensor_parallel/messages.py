"""What shard 0 tells the other shards of a model, and what they answer: msgpack, never pickle.

There are two channels to each: commands, which all shards execute in order,
and events, which go both ways at any time. https://jcristharif.com/msgspec/
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from tgi_cli.config import EngineConfig
from tgi_cli.engine.step import NO_EXTRAS, NewRow, Step


class ShardAssignment(msgspec.Struct, frozen=True, array_like=True):
    """The first command: what to load, as which shard.

    ``folder`` is where the shards meet (:meth:`tgi_cli.device.distributed.Shard.connect`).
    """

    rank: int
    config: EngineConfig
    folder: str
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
    """From shard 0; a shard that runs sends it back."""


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The weights are in place; the shard goes to meet the others."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The shard ends. ``kind`` is a class of :mod:`tgi_cli.errors`, empty: a defect."""

    kind: str
    cause: str
    remedy: str


class AdapterPrepared(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The shard holds an adapter, or cannot, for the reason in ``cause``."""

    adapter_id: int
    cause: str = ""
    remedy: str = ""


Event = Ping | Loaded | Failed | AdapterPrepared


def _to_text(value: Any) -> str:
    return str(value)


def _from_text(kind: type, value: Any) -> Any:
    return kind(value)


# Paths are the only fields that msgpack has no form for.
_encoder = msgspec.msgpack.Encoder(enc_hook=_to_text)
_assignments = msgspec.msgpack.Decoder(ShardAssignment, dec_hook=_from_text)
_command_decoder = msgspec.msgpack.Decoder(Command)
_event_decoder = msgspec.msgpack.Decoder(Event)


def encode(message: ShardAssignment | Command | Event) -> bytes:
    """One message. A step is sent without what concerns sampling alone."""
    if isinstance(message, RunStep) and message.step.new:
        message = RunStep(replace(message.step, new=[_plain(new) for new in message.step.new]))
    return _encoder.encode(message)


def decode_assignment(data: bytes) -> ShardAssignment:
    return _assignments.decode(data)


def decode_command(data: bytes) -> Command:
    """Raises msgspec.ValidationError, as the others do, if it is none."""
    command: Command = _command_decoder.decode(data)
    return command


def decode_event(data: bytes) -> Event:
    event: Event = _event_decoder.decode(data)
    return event


def _plain(new: NewRow) -> NewRow:
    """Without callables and what only shard 0 reports.

    Shard 0 alone chooses tokens: the others are told which, and need of these wishes just those
    that want more logits to be computed.
    """
    extras = new.extras
    if extras is NO_EXTRAS:
        return new
    return replace(
        new, extras=replace(extras, logits_processors=(), return_generation_logits=False)
    )
