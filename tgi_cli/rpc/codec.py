"""Dataclasses to protobuf and back: pure functions, one pair per message.

Encoding reads lists and never changes them; decoding gives plain Python lists. Log probabilities
travel as 32-bit floats.
"""

from __future__ import annotations

from itertools import chain

from tgi_cli.engine.messages import (
    EngineInfo,
    Finished,
    FinishReason,
    GenerationRequest,
    Started,
    StepOutputs,
)
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.sampling.params import SamplingParams

_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "top_logprobs",
)
_INFO_FIELDS = tuple(EngineInfo.__dataclass_fields__)


def encode_submit(request: GenerationRequest) -> pb.ClientMessage:
    """A request as a client's message. Raises ValueError for numbers that the wire cannot hold."""
    sampling = request.sampling
    return pb.ClientMessage(
        submit=pb.Submit(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            sampling=pb.Sampling(**{name: getattr(sampling, name) for name in _SAMPLING_FIELDS}),
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            cache_salt=request.cache_salt,
        )
    )


def decode_submit(message: pb.Submit) -> GenerationRequest:
    """The request of a message. Raises ValueError for sampling values outside their range."""
    sampling = message.sampling
    return GenerationRequest(
        request_id=message.request_id,
        prompt_ids=tuple(message.prompt_ids),
        sampling=SamplingParams(**{name: getattr(sampling, name) for name in _SAMPLING_FIELDS}),
        max_new_tokens=message.max_new_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        cache_salt=message.cache_salt,
    )


def encode_cancel(request_id: int) -> pb.ClientMessage:
    """A cancellation as a client's message."""
    return pb.ClientMessage(cancel=request_id)


def encode_step(outputs: StepOutputs) -> pb.StepMessage:
    """A step's outputs as one message of packed arrays."""
    message = pb.StepMessage(
        queued=outputs.queued,
        running=outputs.running,
        used_blocks=outputs.used_blocks,
        preemptions=outputs.preemptions,
    )
    message.request_ids.extend(outputs.request_ids)
    message.token_ids.extend(outputs.token_ids)
    message.logprobs.extend(outputs.logprobs)
    if any(outputs.top_ids):
        message.top_counts.extend(map(len, outputs.top_ids))
        message.top_ids.extend(chain.from_iterable(outputs.top_ids))
        message.top_logprobs.extend(chain.from_iterable(outputs.top_logprobs))
    for started in outputs.started:
        message.started.add(
            request_id=started.request_id,
            queue_ns=started.queue_ns,
            cached_tokens=started.cached_tokens,
        )
    for finished in outputs.finished:
        message.finished.add(
            request_id=finished.request_id, reason=finished.reason, error=finished.error
        )
    return message


def decode_step(message: pb.StepMessage) -> StepOutputs:
    """The outputs of a message."""
    request_ids = message.request_ids[:]
    counts = message.top_counts[:]
    if counts:
        flat_ids, flat_logprobs = message.top_ids[:], message.top_logprobs[:]
        top_ids: list[list[int]] = []
        top_logprobs: list[list[float]] = []
        start = 0
        for count in counts:
            top_ids.append(flat_ids[start : start + count])
            top_logprobs.append(flat_logprobs[start : start + count])
            start += count
    else:
        top_ids = [[] for _ in request_ids]
        top_logprobs = [[] for _ in request_ids]
    return StepOutputs(
        request_ids=request_ids,
        token_ids=message.token_ids[:],
        logprobs=message.logprobs[:],
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        started=[Started(s.request_id, s.queue_ns, s.cached_tokens) for s in message.started],
        finished=[
            Finished(f.request_id, FinishReason(f.reason), f.error) for f in message.finished
        ],
        queued=message.queued,
        running=message.running,
        used_blocks=message.used_blocks,
        preemptions=message.preemptions,
    )


def merge_steps(first: StepOutputs, second: StepOutputs) -> None:
    """Append what a later step produced to ``first``, in place; its gauges win."""
    first.request_ids += second.request_ids
    first.token_ids += second.token_ids
    first.logprobs += second.logprobs
    first.top_ids += second.top_ids
    first.top_logprobs += second.top_logprobs
    first.started += second.started
    first.finished += second.finished
    first.queued = second.queued
    first.running = second.running
    first.used_blocks = second.used_blocks
    first.preemptions = second.preemptions


def encode_info(info: EngineInfo) -> pb.InfoResponse:
    """What a client must know of the engine, as a message."""
    return pb.InfoResponse(**{name: getattr(info, name) for name in _INFO_FIELDS})


def decode_info(message: pb.InfoResponse) -> EngineInfo:
    """What a client must know of the engine."""
    fields = {name: getattr(message, name) for name in _INFO_FIELDS}
    fields["eos_token_ids"] = tuple(message.eos_token_ids)
    return EngineInfo(**fields)
