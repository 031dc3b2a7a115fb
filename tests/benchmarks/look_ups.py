"""Measure what looking drafts up costs the host, and what it comes to with steps of any duration.

    python -m tests.benchmarks.look_ups [--steps 0.001 0.01] [--clients 1 8] [--row 0.04]

Replays answers that are known beforehand through a speculator, without a model: a step of B
sequences with d drafts is taken to last ``(1 + ROW * d) * STEP`` seconds, times
``1 + 0.1 * (B - 1)`` for its sequences, and what looking up really takes is added. So the figures
are those of a server whose steps last so long, without the noise of its steps. Time is that of the
processor.

``prose`` are words by Zipf's law, which match everywhere and tell nothing; ``distinct`` never
match; ``copy`` repeats the prompt with changes; ``again`` are answers that were given before.
``us`` are the median and the 90th percentile of a call of ``propose`` per sequence; ``off`` is the
rate of tokens without speculation, which ``on`` is a multiple of.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.speculation.adaptive import AdaptiveSpeculator
from tgi_cli.engine.speculation.lookup import GrammarDrafter, LookupDrafter
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import Step, StepTime, TokenAppend
from tgi_cli.sampling.params import SamplingParams

PROMPT, ANSWER = 200, 96
REQUESTS = 24
"""Answers of each client, one after another."""
MOST = 7

Text = tuple[list[int], list[int]]
"""A prompt and its answer."""


def prose(random_: random.Random, number: int) -> Text:
    weights = [1 / rank for rank in range(1, 3001)]
    words = random_.choices(range(3000), weights, k=PROMPT + ANSWER)
    return words[:PROMPT], words[PROMPT:]


def distinct(random_: random.Random, number: int) -> Text:
    first = number * (PROMPT + ANSWER)
    words = list(range(first, first + PROMPT + ANSWER))
    return words[:PROMPT], words[PROMPT:]


def copy(random_: random.Random, number: int) -> Text:
    prompt, _ = prose(random_, number)
    changed = [random_.randrange(3000) if random_.random() < 0.05 else word for word in prompt]
    return prompt, changed[:ANSWER]


def again(random_: random.Random, number: int) -> Text:
    prompt, _ = prose(random_, number)
    return prompt, prose(random.Random(number % 3), 0)[1]


WORKLOADS: dict[str, Callable[[random.Random, int], Text]] = {
    "prose": prose,
    "distinct": distinct,
    "copy": copy,
    "again": again,
}


@dataclass
class Figures:
    """Of one workload with one duration of steps."""

    calls: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    seconds: float = 0.0
    seconds_off: float = 0.0


class Client:
    """One sequence after another, each known beforehand."""

    def __init__(self, texts: list[Text], ids: itertools.count[int]) -> None:
        self._texts, self._ids = iter(texts), ids
        self.sequence: Sequence | None = None
        self.answer: list[int] = []

    def begin(self) -> bool:
        """Begin the next request; False if there is none."""
        text = next(self._texts, None)
        if text is None:
            self.sequence = None
            return False
        prompt, self.answer = text
        number = next(self._ids)
        request = GenerationRequest(
            request_id=number,
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0),
            max_new_tokens=len(self.answer),
        )
        self.sequence = Sequence(request, number)
        self.sequence.token_ids.append(self.answer[0])
        return True

    def advance(self, drafts: list[int]) -> int:
        """Append what follows, of ``drafts`` what is right; returns how many were."""
        assert self.sequence is not None
        known = self.sequence.token_ids
        done = len(known) - PROMPT
        right = 0
        for draft, token in zip(drafts, self.answer[done:], strict=False):
            if draft != token:
                break
            right += 1
        known.extend(self.answer[done : done + right + 1])
        return right

    @property
    def is_done(self) -> bool:
        return self.sequence is not None and len(self.sequence.token_ids) >= PROMPT + ANSWER


def replay(workload: str, clients: int, step: float, row: float) -> Figures:
    """Run a workload through a speculator."""

    def duration(sequences: int, drafts: int) -> float:
        return step * (1 + 0.1 * (sequences - 1)) * (1 + row * drafts)

    times = [StepTime(1, 1 + drafts, 8, duration(1, drafts)) for drafts in (0, 1, 3, 7, 15)]
    times += [StepTime(n, n, 8, duration(n, 0)) for n in (2, 4, 8, 16)]
    speculator = AdaptiveSpeculator(
        MOST, StepCosts(times, MOST), (GrammarDrafter(), LookupDrafter()), time.thread_time
    )
    random_, ids = random.Random(0), itertools.count()
    texts = [WORKLOADS[workload](random_, number) for number in range(REQUESTS * clients)]
    parts = [texts[first::clients] for first in range(clients)]
    running = [client for client in (Client(part, ids) for part in parts) if client.begin()]
    figures = Figures()
    for number in itertools.count():
        if not running:
            return figures
        sequences = [client.sequence for client in running if client.sequence is not None]
        began = time.thread_time()
        proposals = speculator.propose(sequences, False)
        host = time.thread_time() - began
        made = Step(number, num_decodes=len(sequences), rows=list(range(len(sequences))))
        for client, drafts in zip(running, proposals, strict=True):
            assert client.sequence is not None
            made.starts.append(len(client.sequence.token_ids) - 1)
            made.counts.append(1 + len(drafts))
            right = client.advance(drafts)
            if drafts:
                made.drafts.append(TokenAppend(0, 0, drafts))
                speculator.learn(client.sequence, drafts, right)
            figures.drafted += len(drafts)
            figures.accepted += right
            figures.tokens += 1 + right
            figures.seconds_off += (1 + right) * duration(len(sequences), 0) / len(sequences)
        taken = duration(len(sequences), made.num_drafts) + host
        figures.calls.append(host / len(sequences))
        began = time.thread_time()
        speculator.timed(made, taken)
        for client in list(running):
            if client.is_done:
                assert client.sequence is not None
                speculator.finish(client.sequence)
                if not client.begin():
                    running.remove(client)
        figures.seconds += taken + time.thread_time() - began
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=float, nargs="+", default=[0.001, 0.01], help="seconds")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--row", type=float, default=0.04, help="share of a step per draft")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    options = parser.parse_args()
    print("| step ms | workload | clients | us, median (90 %) | accepted | on / off |")
    print("|---|---|---|---|---|---|")
    for step, workload, clients in itertools.product(
        options.steps, options.workloads, options.clients
    ):
        figures = replay(workload, clients, step, options.row)
        calls = [1e6 * each for each in figures.calls]
        late = statistics.quantiles(calls, n=10)[-1]
        share = figures.accepted / figures.drafted if figures.drafted else 0.0
        ratio = figures.seconds_off / figures.seconds
        print(
            f"| {step * 1e3:g} | {workload} | {clients} | {statistics.median(calls):.1f} "
            f"({late:.1f}) | {share:.0%} of {figures.drafted} | {ratio:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
