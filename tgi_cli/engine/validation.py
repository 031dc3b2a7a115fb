"""Which requests are not let into the queue, and why."""

from __future__ import annotations

from collections.abc import Mapping

from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.grammar import Grammars
from tgi_cli.engine.lora_slots import Adapters
from tgi_cli.engine.messages import Finished, FinishReason, GenerationRequest
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.waiting_queue import WaitingQueue


def validate_request(
    request: GenerationRequest,
    limits: SchedulerConfig,
    live: Mapping[int, Sequence],
    waiting: WaitingQueue,
    adapters: Adapters,
    grammars: Grammars,
) -> Finished | None:
    """The end of a request that can never run (ERROR) or finds the queue full (OVERLOADED)."""
    cause = (
        _impossible(request, limits, live) or adapters.refusal(request) or grammars.refusal(request)
    )
    if cause:
        return Finished(request.request_id, FinishReason.ERROR, cause)
    most_requests, most_tokens = limits.max_queued_requests, limits.max_queued_tokens
    if most_requests is not None and len(waiting) >= most_requests:
        cause = f"{len(waiting)} requests are waiting"
    if most_tokens is not None and waiting.num_tokens + len(request.prompt_ids) > most_tokens:
        cause = f"{waiting.num_tokens} tokens are waiting to be computed"
    return Finished(request.request_id, FinishReason.OVERLOADED, cause) if cause else None


def _impossible(
    request: GenerationRequest, limits: SchedulerConfig, live: Mapping[int, Sequence]
) -> str:
    """Why a request can never run, or nothing."""
    if request.request_id in live:
        return f"request id {request.request_id} is in use"
    if not request.prompt_ids:
        return "the prompt has no tokens"
    if request.max_new_tokens < 1:
        return "max_new_tokens must be at least 1"
    prompt = len(request.prompt_ids)
    if prompt + request.max_new_tokens > limits.max_total_tokens:
        return (
            f"{prompt} prompt tokens and {request.max_new_tokens} new ones are more than "
            f"max_total_tokens ({limits.max_total_tokens})"
        )
    parent = None if request.fork_of is None else live.get(request.fork_of)
    if parent is not None and (
        parent.request.prompt_ids != request.prompt_ids
        or parent.request.cache_salt != request.cache_salt
    ):
        return f"fork_of {request.fork_of} is a request of another prompt"
    if parent is not None and parent.request.adapter_id != request.adapter_id:
        return f"fork_of {request.fork_of} is a request of another adapter"
    return ""
