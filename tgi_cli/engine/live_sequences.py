"""The sequences of one scheduling policy, from arrival to end, and their rows."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from tgi_cli.engine.grammar import Grammars
from tgi_cli.engine.messages import Finished, FinishReason, GenerationRequest
from tgi_cli.engine.resources import Resources
from tgi_cli.engine.sequence import Sequence, Status, by_priority
from tgi_cli.engine.speculator import Speculator
from tgi_cli.engine.step import GrammarCompiler, NewRow, OptionalOutputs, Step
from tgi_cli.engine.validation import validate_for_engine, validate_fork
from tgi_cli.engine.waiting_queue import WaitingQueue


class LiveSequences:
    """The sequences of one scheduling policy.

    Args:
        resources: shared with the other batches of the worker.
        compiler: compiles grammars, or None to refuse requests that have one.
        speculator: learns which of its drafts were accepted; None without speculative decoding.

    Attributes:
        live: sequences that wait or run, by request id.
        waiting: sequences without a row.
        running: sequences with a row, in order of priority.
        preemptions: total.
    """

    def __init__(
        self,
        resources: Resources,
        compiler: GrammarCompiler | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.resources = resources
        self.speculator = speculator
        self.config = resources.config
        self.cache = resources.cache
        self.pool = resources.pool
        self.adapters = resources.adapters
        self.grammars = Grammars(compiler)
        self.live: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._arrivals = 0

    # ------------------------------------------------------------------ requests

    def validate(self, request: GenerationRequest) -> None:
        """Check that a request can be run. Raises ValueError if it never can."""
        if request.request_id in self.live:
            raise ValueError(f"request id {request.request_id} is in use")
        validate_for_engine(request, self.config)
        parent = None if request.fork_of is None else self.live.get(request.fork_of)
        if parent is not None:
            validate_fork(request, parent.request)
        self.adapters.validate(request)
        self.grammars.validate(request)

    def add(self, request: GenerationRequest) -> Sequence:
        """Queue a valid request, while its adapter is read and its grammar compiled."""
        self._arrivals += 1
        config = self.config
        sequence = Sequence(request, self._arrivals, config.decoder, config.whole_prompts)
        self.live[request.request_id] = sequence
        if request.fork_of is not None:
            sequence.parent = parent = self.live.get(request.fork_of)
            if parent is not None:
                parent.num_forks += 1
        self.waiting.push(sequence)
        self.adapters.add_request(request.adapter_id)
        self.grammars.add(sequence)
        return sequence

    def cancel(self, request_id: int) -> Finished | None:
        """End a live request now; its row and blocks are free for the next step."""
        sequence = self.live.get(request_id)
        return None if sequence is None else self.finish(sequence, FinishReason.CANCELLED)

    def finish_all(self, reason: FinishReason, error: str = "") -> list[Finished]:
        """End every live request."""
        return [self.finish(sequence, reason, error) for sequence in list(self.live.values())]

    def fail_adapters(self, failed: Iterable[tuple[int, str]]) -> list[Finished]:
        """End the requests of adapters that could not be read: ``failed`` has ids and causes."""
        return [
            self.finish(sequence, FinishReason.ERROR, error)
            for adapter_id, error in failed
            for sequence in list(self.live.values())
            if sequence.request.adapter_id == adapter_id
        ]

    def collect_grammars(self) -> list[Finished]:
        """Take the grammars that have been compiled; end the requests of those that failed."""
        failed = self.grammars.collect() if self.grammars.compiling else ()
        return [self.finish(sequence, FinishReason.GRAMMAR, error) for sequence, error in failed]

    def end_failed_images(self) -> list[Finished]:
        """End the running sequences that wait for an image that could not be encoded."""
        images = self.resources.images
        if images is None or not images.cache.failed:
            return []
        ended = []
        for sequence in list(self.running):
            errors = [image.error for image in sequence.held_images.values() if image.error]
            if errors and sequence.status is Status.RUNNING:
                ended += self.end_with_forks(sequence, errors[0])
        return ended

    def end_with_forks(self, sequence: Sequence, cause: str) -> list[Finished]:
        """End a sequence whose prompt was computed wrongly, and the forks that share its blocks."""
        ended = [self.finish(sequence, FinishReason.ERROR, cause)]
        for fork in list(self.running):
            shares = not (fork.attempt or sequence.attempt) and fork.status is Status.RUNNING
            if shares and fork.request.fork_of == sequence.request.request_id:
                ended += self.end_with_forks(fork, cause)
        return ended

    def finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> Finished:
        """End a live sequence."""
        if sequence.status is Status.RUNNING:
            self._leave_row(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.load is not None:
            sequence.load.take()
            sequence.load = None
        sequence.status = Status.FINISHED
        self.adapters.remove_request(sequence.request.adapter_id)
        self.grammars.remove(sequence)
        if self.speculator is not None:
            self.speculator.finish(sequence)
        self._leave_parent(sequence)
        del self.live[sequence.request.request_id]
        return Finished(sequence.request.request_id, reason, error)

    def _leave_parent(self, sequence: Sequence) -> None:
        """Detach a fork that has started or ended from its parent."""
        parent, sequence.parent = sequence.parent, None
        if parent is not None:
            parent.num_forks -= 1
            if not parent.num_forks and self.resources.states is not None:
                self.resources.states.release_prompt(parent)

    # ------------------------------------------------------------------ rows

    def run(self, sequence: Sequence, step: Step) -> bool:
        """Give a waiting sequence that has its blocks a row in ``step``.

        Returns:
            Whether this is its first row; False when it resumes after preemption.
        """
        request, resources = sequence.request, self.resources
        self.waiting.admit(sequence)
        insort(self.running, sequence, key=by_priority)
        sequence.row = resources.free_rows.pop()
        sequence.status = Status.RUNNING
        if resources.states is not None:
            resources.states.attach(sequence)
        step.new.append(
            NewRow(
                row=sequence.row,
                request_id=request.request_id,
                token_ids=list(sequence.token_ids),
                prompt_tokens=sequence.prompt_tokens,
                block_ids=list(sequence.block_ids),
                sampling=request.sampling,
                extras=OptionalOutputs.of(request),
                adapter_slot=self.adapters.acquire(request.adapter_id, step),
                images=() if sequence.images is None else sequence.images.rows,
            )
        )
        if sequence.started:
            return False
        sequence.started = True
        self._leave_parent(sequence)
        sequence.reused_tokens = sequence.num_computed
        resources.reused_tokens += sequence.num_computed
        resources.prompt_tokens += sequence.prompt_tokens
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take row and blocks from a running sequence; it will be recomputed."""
        self.preemptions += 1
        self._leave_row(sequence)
        sequence.rewind()
        self.waiting.push(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.resources.freed_rows.append(sequence.row)
        self.resources.free_rows.append(sequence.row)
        self.cache.release(sequence)
        self.adapters.release(sequence.request.adapter_id)
        self.release_images(sequence)

    def release_images(self, sequence: Sequence) -> None:
        """Release the images of a sequence that has left its row or pauses."""
        if sequence.held_images and self.resources.images is not None:
            self.resources.images.release(sequence)
