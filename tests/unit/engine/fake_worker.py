"""A worker without a model, whose tokens depend on every earlier one through the KV blocks.

The "KV" of a position is a digest of all tokens up to it, stored in the block that the block
table names. A step reads its context back through the table and compares it with what the row's
tokens say, so a wrong block, a stale cached prefix or a lost difference is an assertion, not
just another output. The next token is a function of that digest: preemption, chunks, cached
prefixes and batch mates must not change it. A recurrent state is the same digest, kept in a state
slot: it is wrong as soon as a token is missed, repeated or taken out of order. A row's digests
begin with the adapter that stands in its slot, and an adapter must be held when a step puts it
there. A mask leaves the digest the choice among the tokens that it allows.

A token that stands for an image is seen as a number that the encoder gives for that row of it (see
:mod:`tests.unit.engine.fake_images`): so the digests tell another image, another row of it, and
features that were dropped. What must not be parted is checked where a chunk ends.

Asked for proposals, it gives what it will choose next, but every fifth one is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from tests.unit.engine.fake_images import IMAGE_ID, features
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.image_slices import EncodeReport
from tgi_cli.engine.step import FRESH, GrammarCompiler, NewRow, Proposal, Step, StepResult

VOID = b"void"
"""In place of the KV of tokens that a failed image was to stand for."""


def digest(parent: bytes, token: int) -> bytes:
    return blake2b(parent + token.to_bytes(4, "little"), digest_size=8).digest()


def next_token(context: bytes, vocab_size: int, allowed: Sequence[int] | None = None) -> int:
    """Of all tokens, or of some; -1 where that are none."""
    number = int.from_bytes(context, "little")
    if allowed is None:
        return number % vocab_size
    return allowed[number % len(allowed)] if allowed else -1


def allowed_by(masks: tuple[Sequence[int], Any] | None) -> dict[int, list[int]]:
    """The tokens of each mask, by its entry."""
    if masks is None:
        return {}
    entries, bits = masks
    assert len(set(entries)) == len(entries) == len(bits)
    rows = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), axis=1, bitorder="little")
    return {e: np.flatnonzero(row).tolist() for e, row in zip(entries, rows, strict=True)}


def root(adapter_id: int) -> bytes:
    """Of the digests of a sequence."""
    return str(adapter_id).encode() if adapter_id else b""


def continuation(
    prompt: Sequence[int], count: int, vocab_size: int, adapter_id: int = 0
) -> list[int]:
    """What the fake model answers to a prompt, computed alone."""
    context = root(adapter_id)
    for token in prompt:
        context = digest(context, token)
    answer: list[int] = []
    for _ in range(count):
        answer.append(next_token(context, vocab_size))
        context = digest(context, answer[-1])
    return answer


@dataclass
class _Row:
    request_id: int
    tokens: dict[int, int]
    blocks: list[int]
    adapter_slot: int
    new: NewRow


@dataclass
class _Begun:
    """An image in the encoder."""

    pixels: bytes
    rows: int
    layers: int = 0
    passed: float = 0.0
    timed: bool = False
    """Whether a slice bounded by time has run."""


@dataclass
class _Pending:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


@dataclass
class FakeWorker:
    block_size: int
    vocab_size: int = 1000
    window: int | None = None
    kv: dict[tuple[int, int], bytes] = field(default_factory=dict)
    host: dict[int, bytes] = field(default_factory=dict)
    rows: dict[int, _Row] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    fail_when: Callable[[Step], Exception | None] = lambda step: None
    poison: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    slots: dict[int, int] = field(default_factory=dict)
    read: list[int] = field(default_factory=list)
    """Adapters, in the order in which they were read."""
    slow: bool = False
    """Readings end when ``finish_reading`` is called, not at once."""
    readings: dict[int, Future[None]] = field(default_factory=dict)
    broken: dict[int, Exception] = field(default_factory=dict)
    """What reading an adapter raises."""
    grammars: GrammarCompiler | None = None
    logprob: float = 0.0
    state_slots: int = 0
    """Of a model with recurrent states."""
    states: dict[int, bytes] = field(default_factory=dict)
    masked: int = 0
    """Tokens that were chosen under a mask."""
    drafted: int = 0
    """Draft tokens that were computed."""
    proposed: int = 0
    """Draft tokens that were proposed."""
    encoder_layers: int = 0
    """Of a model that takes images."""
    cache_rows: int = 0
    """Rows of features that it may hold."""
    whole_prompts: bool = False
    seen: dict[int, list[int]] = field(default_factory=dict)
    """Prompts as the model sees them, by request: of those with images, or of all whole ones."""
    features: dict[int, list[int]] = field(default_factory=dict)
    begun: dict[int, _Begun] = field(default_factory=dict)
    unencoded: dict[int, str] = field(default_factory=dict)
    """Keys of images that could not be encoded."""
    unreadable: set[bytes] = field(default_factory=set)
    """Pixels that cannot be encoded."""
    keys: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    """Of the step that was launched last."""
    layer_seconds: float = 1.0
    """That a layer of the encoder takes."""
    progress: dict[int, int] = field(default_factory=dict)
    """Likewise, layers of slices that were bounded by time."""

    @classmethod
    def of(cls, limits: SchedulerConfig, **more: Any) -> FakeWorker:
        """Of the model that has these limits."""
        encoder = limits.encoder
        return cls(
            limits.block_size,
            state_slots=limits.num_state_slots,
            encoder_layers=0 if encoder is None else encoder.layers,
            cache_rows=0 if encoder is None else encoder.cache_rows,
            whole_prompts=limits.whole_prompts,
            **more,
        )

    def prepare_adapter(self, adapter_id: int, name: str, path: str) -> Future[None]:
        assert adapter_id not in self.held | set(self.readings), "it is there, or on its way"
        self.read.append(adapter_id)
        self.readings[adapter_id] = future = Future[None]()
        if not self.slow:
            self.finish_reading(adapter_id)
        return future

    def finish_reading(self, adapter_id: int) -> None:
        future = self.readings.pop(adapter_id)
        if adapter_id in self.broken:
            future.set_exception(self.broken[adapter_id])
        else:
            self.held.add(adapter_id)
            future.set_result(None)

    def forget_adapter(self, adapter_id: int) -> None:
        self.held.remove(adapter_id)

    def export_block(self, block: int) -> bytes:
        return b"".join(self.kv[block, offset].ljust(8) for offset in range(self.block_size))

    def _offload(self, step: Step) -> None:
        for block, slot in step.offloads:
            self.host[slot] = self.export_block(block)
        for slot, block in step.restores:
            self._import(block, self.host[slot])

    def _load(self, step: Step) -> None:
        for block, content in step.loads:
            self._import(block, content)

    def _import(self, block: int, content: bytes) -> None:
        for offset in range(self.block_size):
            found = content[8 * offset : 8 * offset + 8]
            self.kv[block, offset] = VOID if found.rstrip() == VOID else found

    def launch(self, step: Step) -> list[tuple[int, int, bytes]]:
        self.steps.append(step)
        error = self.fail_when(step)
        for row in step.freed:
            del self.rows[row]
        for new in step.new:
            assert new.row not in self.rows, "a row was given away twice"
            tokens = dict(enumerate(new.token_ids))
            blocks = list(new.block_ids)
            self.rows[new.row] = _Row(new.request_id, tokens, blocks, new.adapter_slot, new)
        for slot, adapter_id in step.adapters:
            assert adapter_id in self.held, "an adapter is used that the host has given up"
            self.slots[slot] = adapter_id
        for given in step.forced_tokens:
            known = self.rows[given.row].tokens
            assert given.start > 0
            assert given.start - 1 in known, "a hole in a row's tokens"
            known.update(enumerate(given.token_ids, given.start))
        for more in step.appended:
            blocks = self.rows[more.row].blocks
            assert more.start == len(blocks)
            blocks.extend(more.block_ids)
        self._offload(step)
        self._load(step)
        self._encode(step)
        if error is not None:
            raise error
        for source, destination in step.copies:
            for offset in range(self.block_size):
                if (source, offset) in self.kv:
                    self.kv[destination, offset] = self.kv[source, offset]
        assert len(set(step.rows)) == len(step.rows), "a row is in a step twice"
        decodes = list(zip(step.counts, step.samples, strict=True))[: step.num_decodes]
        assert all(count == samples >= 1 for count, samples in decodes)
        assert decodes == sorted(decodes, key=lambda decode: decode > (1, 1)), "drafts come last"
        assert all(span.index >= step.num_decodes for span in step.images), "no decode has images"
        self._write_drafts(step)
        return self._forward(step)

    def _encode(self, step: Step) -> None:
        for key in step.dropped_images:
            assert key in self.keys, "an image is dropped that was never begun"
            for held in (self.features, self.begun, self.unencoded):
                held.pop(key, None)
        ended = set()
        for part in step.encodes:
            if part.tensors is not None:
                assert not self.begun, "two images are in the encoder"
                assert part.key not in self.keys, "a key is used again"
                self.keys.add(part.key)
                self.begun[part.key] = _Begun(part.tensors["pixels"], part.rows)
            begun = self.begun[part.key]
            if part.seconds is not None:
                assert (part.layers, part.last) == (0, False)
                assert part.seconds > 0
                begun.timed = True
                begun.passed += part.seconds / self.layer_seconds
                begun.layers = min(int(begun.passed + 1e-6), self.encoder_layers)
                self.progress[part.key] = begun.layers
                continue
            assert part.layers > 0 or begun.layers == self.encoder_layers
            reached = begun.layers + part.layers
            # A slice bounded by time may have gone further than this one was planned with.
            assert begun.timed or part.last == (reached == self.encoder_layers)
            begun.layers = self.encoder_layers if part.last else min(reached, self.encoder_layers)
            begun.passed = begun.layers
            if part.last:
                ended.add(part.key)
                del self.begun[part.key]
                if begun.pixels in self.unreadable:
                    self.unencoded[part.key] = "the image is unreadable"
                else:
                    self.features[part.key] = features(begun.pixels, begun.rows)
        held_rows = sum(map(len, self.features.values()))
        held_rows += sum(begun.rows for begun in self.begun.values())
        assert held_rows <= self.cache_rows, "more features than there is room for"
        ended |= {span.key for span in step.images}
        self.failed = {key: self.unencoded[key] for key in ended if key in self.unencoded}

    def _image_rows(self, step: Step) -> dict[tuple[int, int], int]:
        """By entry and position, what is seen there; -1 where an image has failed."""
        rows: dict[tuple[int, int], int] = {}
        places = [(span.index, span.offset) for span in step.images]
        assert places == sorted(places), "rows of images are not in the order of the tokens"
        for span in step.images:
            for index in range(span.count):
                known = self.features.get(span.key)
                assert known is not None or span.key in self.unencoded, "an image is not encoded"
                place = span.index, step.starts[span.index] + span.offset + index
                assert place not in rows
                assert span.offset + index < step.counts[span.index]
                rows[place] = -1 if known is None else known[span.first + index]
        return rows

    def _check_spans(self, row: _Row, start: int, end: int) -> None:
        """What must not be parted is not."""
        if self.whole_prompts:
            assert not start < row.new.prompt_tokens or end >= row.new.prompt_tokens
        for image in row.new.images:
            for first, count in image.spans if image.bidirectional else ():
                assert not first < end < first + count, "a span is parted"

    def _write_drafts(self, step: Step) -> None:
        drafts = {draft.row: draft for draft in step.drafts}
        assert len(drafts) == len(step.drafts)
        self.drafted += step.num_drafts
        for row, start, count, samples in zip(
            step.rows, step.starts, step.counts, step.samples, strict=True
        ):
            draft = drafts.pop(row, None)
            length = 0 if draft is None else len(draft.token_ids)
            assert samples in ((0, 1) if draft is None else (1 + length,))
            if draft is not None:
                assert draft.token_ids
                assert draft.start == start + count - length
                assert IMAGE_ID not in draft.token_ids, "an image is no draft"
                self.rows[row].tokens.update(enumerate(draft.token_ids, draft.start))
        assert not drafts, "drafts of a row that the step does not compute"
        assert len(step.proposals) in (0, len(step.rows))
        for wanted, samples in zip(step.proposals, step.samples, strict=False):
            assert samples or not wanted, "proposed behind a token that is not chosen"

    def _forward(self, step: Step) -> list[tuple[int, int, bytes]]:
        sampled = []
        self._check_slots(step)
        written: dict[int, bytes] = {}
        images = self._image_rows(step)
        for index, (row_id, start, count, samples) in enumerate(
            zip(step.rows, step.starts, step.counts, step.samples, strict=True)
        ):
            row = self.rows[row_id]
            expected = root(self.slots[row.adapter_slot] if row.adapter_slot >= 0 else 0)
            before = expected
            visible = 0 if self.window is None else start - self.window + 1
            self._check_spans(row, start, start + count)
            known = self._known(row)
            void = False
            for position in range(start):
                expected = digest(expected, known(position))
                if position >= visible:
                    found = self.kv[self._slot(row, position)]
                    void |= found == VOID
                    assert void or found == expected, "wrong KV in the context"
            for position in range(start, start + count):
                shown = images.pop((index, position), None)
                is_row = any(
                    first <= position < first + rows
                    for image in row.new.images
                    for first, rows in image.spans
                )
                assert is_row == (shown is not None), "rows of images are not where images are"
                void |= shown == -1
                own = void or shown in (None, known(position))
                # There, a whole prompt shows what all of it is.
                assert own or (self.whole_prompts and position == 0), "rows of another image"
            if self.state_slots:
                source = step.state_in[index]
                assert (source == FRESH) == (start == 0), "a fresh state belongs to position 0"
                state = before if source == FRESH else self.states.get(source, b"nan")
                assert state == expected, "a state of other tokens"
                for position in range(start, start + count):
                    state = digest(state, known(position))
                    for snapshot in step.snapshots:
                        if (snapshot.index, start + snapshot.count) == (index, position + 1):
                            written[snapshot.slot] = state
                written[step.state_out[index]] = state
            for position in range(start, start + count):
                expected = VOID if void else digest(expected, known(position))
                self.kv[self._slot(row, position)] = expected
                if position >= start + count - samples:
                    sampled.append((row_id, position + 1, expected))
        assert not images, "rows of images for tokens that are not computed"
        self.states |= written
        return sampled

    def _known(self, row: _Row) -> Callable[[int], int]:
        """What the model sees at each position of a row."""
        prompt = self.seen.get(row.request_id, [])
        assert bool(prompt) or not row.new.images
        return lambda position: prompt[position] if position < len(prompt) else row.tokens[position]

    def _check_slots(self, step: Step) -> None:
        """What lets the entries of a step run in any order, at the same time."""
        if not self.state_slots:
            assert not step.state_in + step.state_out + step.snapshots
            return
        assert len(step.state_in) == len(step.state_out) == len(step.rows)
        writes = [(slot, index) for index, slot in enumerate(step.state_out)]
        writes += [(snapshot.slot, snapshot.index) for snapshot in step.snapshots]
        assert all(0 <= slot < self.state_slots for slot, _ in writes)
        assert len({slot for slot, _ in writes}) == len(writes), "a slot is written twice"
        assert len({snapshot.index for snapshot in step.snapshots}) == len(step.snapshots)
        for snapshot in step.snapshots:
            assert 0 < snapshot.count < step.counts[snapshot.index]
            assert step.state_in[snapshot.index] != snapshot.slot
        writers = dict(writes)
        for index, slot in enumerate(step.state_in):
            assert writers.get(slot, index) == index, "a slot is read and written by two entries"

    def _slot(self, row: _Row, position: int) -> tuple[int, int]:
        return row.blocks[position // self.block_size], position % self.block_size

    def sample(self, handle: object, masks: tuple[Sequence[int], Any] | None = None) -> _Pending:
        assert isinstance(handle, list)
        tokens = []
        errors = {}
        allowed = allowed_by(masks)
        assert not allowed or self.steps[-1].reads_logits, "other shards are not told of the masks"
        self.masked += len(allowed)
        for index, (row_id, position, context) in enumerate(handle):
            token = next_token(context, self.vocab_size, allowed.get(index))
            if token < 0:
                errors[index], token = "no token may be chosen", 0
            self.rows[row_id].tokens[position] = token
            tokens.append(token)
            if self.rows[row_id].request_id in self.poison:
                errors[index] = "its logits are not numbers"
        count = len(tokens)
        empty: list[list[int]] = [[] for _ in range(count)]
        result = StepResult(
            tokens, [self.logprob] * count, empty, [[] for _ in range(count)], errors
        )
        result.encodes = EncodeReport(self.failed, self.progress)
        self.failed, self.progress = {}, {}
        self._propose(self.steps[-1], handle, tokens, result)
        return _Pending(result)

    def _propose(
        self,
        step: Step,
        sampled: list[tuple[int, int, bytes]],
        tokens: list[int],
        result: StepResult,
    ) -> None:
        drafts = {draft.row: draft.token_ids for draft in step.drafts}
        first = 0
        for entry, (row, samples) in enumerate(zip(step.rows, step.samples, strict=True)):
            begin, first = first, first + samples
            wanted = step.proposals[entry] if step.proposals else 0
            if not wanted:
                continue
            last = begin
            for draft in drafts.get(row, []):
                if tokens[last] != draft:
                    break
                last += 1
            context, token, proposal = sampled[last][2], tokens[last], list[int]()
            for _ in range(wanted):
                context = digest(context, token)
                token = next_token(context, self.vocab_size)
                proposal.append((token + (context[0] % 5 == 0)) % self.vocab_size)
            self.proposed += len(proposal)
            result.proposals[entry] = Proposal(proposal, [0.8] * len(proposal))


def unhurried(worker: FakeWorker) -> threading.Event:
    """Let steps take 50 ms until the event is set: a long answer cannot end unseen."""
    hurry = threading.Event()

    def wait(_step: Step) -> None:
        hurry.wait(0.05)

    worker.fail_when = wait
    return hurry
