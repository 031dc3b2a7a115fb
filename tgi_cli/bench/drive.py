"""Runs one step of a benchmark in processes of its own, and tells what happens as it happens.

    driver = Driver(target, settings, tokenizer)
    async with contextlib.aclosing(driver.drive(step, requests, index, total)) as events:
        async for event in events: ...

The events of a step, in order: StepStarted; then Progress (four times a second), RequestDone,
BatchDone and StepFailed as they come; StepEnded with the whole record. Always the last: also when
the step was stopped, or its load generator died (StepFailed with ``fatal``, then StepEnded with
what there was).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable

from tgi_cli.bench.records import Event, Request, Step, Target
from tgi_cli.bench.settings import Settings, TokenCounter


class Driver:
    """Puts load on one target, a step at a time.

    Args:
        target: a URL (``tgi``, ``openai``) or a socket (``shard-v3``).
        settings: of all requests.
        tokenizer: counts answers whose server does not say, and checks what others say; None:
            events are counted, and nothing is checked.

    Attributes:
        notes: what a reader of the figures must know, one sentence each, without repeats; for
            ``Run.notes``.
        server: the target's own figures of now, by TGI's names, read once a second while a step
            runs; empty where it has none.
    """

    notes: list[str]
    server: dict[str, float]

    def __init__(
        self, target: Target, settings: Settings, tokenizer: TokenCounter | None = None
    ) -> None: ...

    def drive(
        self, step: Step, requests: Iterable[Request], index: int = 0, total: int = 0
    ) -> AsyncGenerator[Event, None]:
        """Run ``step`` with the requests in their order.

        ``requests`` may be endless and slow: it is read in a thread, a little ahead of need. Of a
        step of the kind ``batch`` each run takes ``step.value`` of them; ``step.requests`` counts
        runs there, and the warm-ups are the first ones, within that count.

        Closing the generator (or cancelling the task) ends the load generator at once.
        """

    def stop(self, reason: str = "stopped") -> None:
        """End the running step now; its record has what was done, and ``stopped`` says why.

        Requests in flight are dropped and not recorded. Nothing happens where no step runs.
        """
