"""The contract of functions that change a request's logits, in the engine's own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class LogitsProcessor(Protocol):
    """Changes the logits of one request (TensorRT-LLM's LogitsPostProcessor)."""

    def __call__(
        self, request_id: int, logits: Any, token_ids: Sequence[int], client_id: int | None
    ) -> Any:
        """Return the logits to continue with.

        Args:
            request_id: id of the request.
            logits: float32 tensor [V] on the model's device; may be changed in place.
            token_ids: prompt and generated tokens so far.
            client_id: the request's ``client_id``.

        An exception ends this request alone, with its message.
        """
        ...
