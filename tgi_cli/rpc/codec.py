"""Dataclasses to protobuf and back: pure functions, one pair per message.

Encoding does not change lists; decoding returns plain Python lists. Log-probabilities travel as
32-bit floats.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from typing import TypeVar

from tgi_cli.engine.messages import (
    EngineInfo,
    Finished,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    Started,
    StepOutputs,
    VerifiedDrafts,
)
from tgi_cli.engine.metrics import EngineLoad, EngineMetrics, Histogram
from tgi_cli.engine.thinking import ThinkingBudget
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.rpc.image_codec import ReceivedImages, encode_images
from tgi_cli.rpc.interface import Adapter, Adapters
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.telemetry.context import TraceContext

_T = TypeVar("_T")

_SAMPLING_SCALARS = tuple(
    name
    for name in pb.Sampling.DESCRIPTOR.fields_by_name
    if name in SamplingParams.__dataclass_fields__ and name != "allowed_token_ids"
)
_SUBMIT_SCALARS = (
    *("request_id", "max_new_tokens", "ignore_eos", "priority"),
    *("cache_salt", "tenant"),
)
NO_ADAPTERS = Adapters()
_STEP_LISTS = (
    *("request_ids", "token_ids", "logprobs", "top_ids", "top_logprobs"),
    *("started", "finished", "prompt_logprobs", "drafts"),
)
_OPTIONAL = ("timeout_seconds", "fork_of", "prompt_logprobs", "client_id", "grammar", "first_id")
_INFO_FIELDS = tuple(EngineInfo.__dataclass_fields__)


def encode_submit(request: GenerationRequest, adapter: str = "") -> pb.ClientMessage:
    """Encode a request and the name of its adapter.

    The tensors of its images must be sent before it:
    :func:`tgi_cli.rpc.image_codec.encode_tensors`.

    Raises:
        ValueError: A number is out of the wire's range, or the request needs the engine's own
            process (logits processors, raw logits).
    """
    if (
        request.logits_processors
        or request.return_context_logits
        or request.return_generation_logits
    ):
        raise ValueError("logits processors and raw logits do not leave the engine's process")
    submit = pb.Submit(
        **{name: getattr(request, name) for name in _SUBMIT_SCALARS},
        prompt_ids=request.prompt_ids,
        prediction=request.prediction,
        sampling=_encode_sampling(request.sampling),
        stop_token_ids=request.stop_token_ids,
        adapter=adapter,
        images=encode_images(request.images),
    )
    for name in _OPTIONAL:
        value = getattr(request, name)
        if value is not None:
            setattr(submit, name, value)
    if request.thinking is not None:
        submit.thinking.CopyFrom(pb.ThinkingBudget(**asdict(request.thinking)))
    if request.trace is not None:
        submit.traceparent = request.trace.traceparent
        submit.tracestate = request.trace.tracestate
    return pb.ClientMessage(submit=submit)


def decode_submit(message: pb.Submit, images: ReceivedImages | None = None) -> GenerationRequest:
    """Decode a request, without its adapter's id.

    Args:
        images: Those that the client has sent. Default: none.

    Raises:
        ValueError: A sampling value is out of range, a thinking budget lacks a marker, or an image
            is invalid.
    """
    received = images or ReceivedImages()
    traced = bool(message.traceparent)
    present = [name for name in _OPTIONAL if message.HasField(name)]
    return GenerationRequest(
        **{name: getattr(message, name) for name in (*_SUBMIT_SCALARS, *present)},
        prompt_ids=tuple(message.prompt_ids),
        prediction=tuple(message.prediction),
        sampling=_decode_sampling(message.sampling),
        stop_token_ids=frozenset(message.stop_token_ids),
        thinking=_decode_thinking(message.thinking) if message.HasField("thinking") else None,
        images=received.of(message.images, len(message.prompt_ids)),
        trace=TraceContext(message.traceparent, message.tracestate) if traced else None,
    )


def _decode_thinking(message: pb.ThinkingBudget) -> ThinkingBudget:
    markers = {name: tuple(getattr(message, name)) for name in ("open", "close", "then", "answer")}
    return ThinkingBudget(tokens=message.tokens, inside=message.inside, **markers)


def _encode_sampling(sampling: SamplingParams) -> pb.Sampling:
    message = pb.Sampling(**{name: getattr(sampling, name) for name in _SAMPLING_SCALARS})
    message.allowed_token_ids.extend(sampling.allowed_token_ids)
    for token_id, bias in sampling.logit_bias:
        message.bias_ids.append(token_id)
        message.biases.append(bias)
    for word in sampling.bad_words:
        message.bad_word_ids.extend(word)
        message.bad_word_lengths.append(len(word))
    return message


def _decode_sampling(message: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        **{name: getattr(message, name) for name in _SAMPLING_SCALARS},
        logit_bias=tuple(zip(message.bias_ids, message.biases, strict=True)),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(map(tuple, _unflatten(message.bad_word_lengths, message.bad_word_ids[:]))),
    )


def _unflatten(counts: Iterable[int], flat: list[_T]) -> list[list[_T]]:
    """Split a list into runs of ``counts`` items."""
    runs = []
    start = 0
    for count in counts:
        runs.append(flat[start : start + count])
        start += count
    return runs


def encode_cancel(request_id: int) -> pb.ClientMessage:
    """Encode a cancellation."""
    return pb.ClientMessage(cancel=request_id)


def encode_step(outputs: StepOutputs) -> pb.StepMessage:
    """Encode a step's outputs as packed arrays."""
    message = pb.StepMessage()
    message.request_ids.extend(outputs.request_ids)
    message.token_ids.extend(outputs.token_ids)
    message.logprobs.extend(outputs.logprobs)
    _encode_tops(message, outputs)
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
    for run in outputs.prompt_logprobs:
        entry = message.prompt_logprobs.add(request_id=run.request_id, start=run.start)
        entry.logprobs.extend(run.logprobs)
        _encode_tops(entry, run)
    for verified in outputs.drafts:
        message.drafts.add(
            request_id=verified.request_id,
            drafted=verified.drafted,
            accepted=verified.accepted,
            source=verified.source,
        )
    return message


def _encode_tops(
    message: pb.StepMessage | pb.PromptLogprobs, outputs: StepOutputs | PromptLogprobs
) -> None:
    if any(outputs.top_ids):
        message.top_counts.extend(map(len, outputs.top_ids))
        message.top_ids.extend(chain.from_iterable(outputs.top_ids))
        message.top_logprobs.extend(chain.from_iterable(outputs.top_logprobs))


def _decode_tops(
    message: pb.StepMessage | pb.PromptLogprobs, count: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Decode the most likely ids and their log-probabilities of ``count`` tokens."""
    counts = message.top_counts[:]
    if not counts:
        return [[] for _ in range(count)], [[] for _ in range(count)]
    return _unflatten(counts, message.top_ids[:]), _unflatten(counts, message.top_logprobs[:])


def decode_step(message: pb.StepMessage) -> StepOutputs:
    """Decode a step's outputs."""
    request_ids = message.request_ids[:]
    top_ids, top_logprobs = _decode_tops(message, len(request_ids))
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
        prompt_logprobs=[
            PromptLogprobs(p.request_id, p.start, p.logprobs[:], *_decode_tops(p, len(p.logprobs)))
            for p in message.prompt_logprobs
        ],
        drafts=[
            VerifiedDrafts(d.request_id, d.drafted, d.accepted, d.source) for d in message.drafts
        ],
    )


def merge_steps(first: StepOutputs, second: StepOutputs) -> None:
    """Append what a later step produced to ``first``, in place."""
    for name in _STEP_LISTS:
        getattr(first, name).extend(getattr(second, name))


def encode_info(
    info: EngineInfo, adapters: Adapters = NO_ADAPTERS, instance: str = ""
) -> pb.InfoResponse:
    """Encode the engine's info; ``instance`` differs after each start of the engine."""
    fields = {name: getattr(info, name) for name in _INFO_FIELDS}
    return pb.InfoResponse(**fields, adapters=encode_adapters(adapters), instance=instance)


def decode_info(message: pb.InfoResponse) -> EngineInfo:
    """Decode the engine's info, without its adapters."""
    fields = {name: getattr(message, name) for name in _INFO_FIELDS}
    fields["eos_token_ids"] = tuple(message.eos_token_ids)
    fields["decoder_start_ids"] = tuple(message.decoder_start_ids)
    fields["nodes"] = tuple(message.nodes)
    return EngineInfo(**fields)


def encode_adapters(adapters: Adapters) -> pb.Adapters:
    """Encode the loaded adapters."""
    loaded = [pb.Adapter(name=adapter.name, path=adapter.path) for adapter in adapters.loaded]
    return pb.Adapters(max_loras=adapters.max_loras, loaded=loaded)


def decode_adapters(message: pb.Adapters) -> Adapters:
    """Decode the loaded adapters."""
    return Adapters(
        message.max_loras,
        tuple(Adapter(adapter.name, adapter.path) for adapter in message.loaded),
    )


def encode_metrics(metrics: EngineMetrics) -> pb.MetricsResponse:
    """Encode the engine's metrics."""
    message = pb.MetricsResponse(
        queue_seconds=metrics.queue_seconds, load=pb.EngineLoad(**asdict(metrics.load))
    )
    for (name, label), histogram in metrics.histograms.items():
        entry = message.histograms.add(name=name, label=label, sum=histogram.sum)
        entry.bounds.extend(histogram.bounds)
        entry.counts.extend(histogram.counts)
    for (name, label), count in metrics.counts.items():
        message.counts.add(name=name, label=label, count=count)
    return message


def decode_metrics(message: pb.MetricsResponse) -> EngineMetrics:
    """Decode the engine's metrics."""
    load = {name: getattr(message.load, name) for name in EngineLoad.__dataclass_fields__}
    metrics = EngineMetrics(EngineLoad(**load))
    for entry in message.histograms:
        histogram = metrics.histograms[entry.name, entry.label] = Histogram(entry.bounds)
        histogram.counts = list(entry.counts)
        histogram.sum = entry.sum
    for count in message.counts:
        metrics.counts[count.name, count.label] = count.count
    if message.queue_seconds:
        metrics.oldest_ns = time.monotonic_ns() - int(message.queue_seconds * 1e9)
    return metrics
