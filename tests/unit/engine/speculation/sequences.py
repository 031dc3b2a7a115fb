"""Sequences as a speculator sees them."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.engine.sequence import Sequence
from tgi_cli.sampling.params import SamplingParams


def sequence(
    prompt: Many[int], answer: Many[int] = (), request_id: int = 0, new: int = 500, **more: Any
) -> Sequence:
    """A sequence that has been answered so far."""
    more.setdefault("sampling", SamplingParams(temperature=0.0))
    made = Sequence(
        GenerationRequest(
            request_id=request_id, prompt_ids=tuple(prompt), max_new_tokens=new, **more
        ),
        request_id,
    )
    made.token_ids.extend(answer)
    return made
