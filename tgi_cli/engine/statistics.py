"""What one step was, in the fields of TensorRT-LLM's batch manager.

https://nvidia.github.io/TensorRT-LLM/legacy/advanced/batch-manager.html#statistics
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatistics:
    """One step of the engine. Counts are requests, blocks or tokens, as named.

    Attributes:
        timestamp: seconds since the epoch.
        iteration: steps so far.
        active_requests: that wait or run.
        max_requests: that can run at once.
        max_blocks, free_blocks, used_blocks: of the KV cache; free ones include those whose
            content is kept for reuse.
        cached_blocks: blocks, used or free, whose content can be found by a prefix.
        tokens_per_block: of the KV cache.
        scheduled_requests: in this step, context_requests + generation_requests.
        context_requests: whose prompt (or what preemption lost) it computed.
        generation_requests: that it gave one more token.
        context_tokens: prompt tokens that it computed.
        reused_tokens: prompt tokens that were found in the prefix cache, since the start.
        prompt_tokens: prompt tokens of all requests that started, since the start.
        preemptions: since the start.
    """

    timestamp: float
    iteration: int
    active_requests: int
    max_requests: int
    max_blocks: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    tokens_per_block: int
    scheduled_requests: int
    context_requests: int
    generation_requests: int
    context_tokens: int
    reused_tokens: int
    prompt_tokens: int
    preemptions: int

    def to_json(self) -> str:
        """One object under the batch manager's own names, and ours for what it lacks."""
        clock = time.strftime("%m-%d-%Y %H:%M:%S", time.localtime(self.timestamp))
        return json.dumps(
            {
                "Timestamp": clock,
                "Iteration Counter": self.iteration,
                "Active Request Count": self.active_requests,
                "Max Request Count": self.max_requests,
                "Max KV cache blocks": self.max_blocks,
                "Free KV cache blocks": self.free_blocks,
                "Used KV cache blocks": self.used_blocks,
                "Tokens per KV cache block": self.tokens_per_block,
                "Scheduled Requests": self.scheduled_requests,
                "Context Requests": self.context_requests,
                "Generation Requests": self.generation_requests,
                "Total Context Tokens": self.context_tokens,
                "MicroBatch ID": 0,
                "Cached KV cache blocks": self.cached_blocks,
                "Reused prompt tokens": self.reused_tokens,
                "Total prompt tokens": self.prompt_tokens,
                "Preemptions": self.preemptions,
            }
        )
