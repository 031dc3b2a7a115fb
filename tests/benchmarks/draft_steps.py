"""What look-ups and drafts cost and gain, step by step, without HTTP.

    python -m tests.benchmarks.draft_steps CHECKPOINT [--workloads chat] [--clients 1 8 32]
        [--rounds 8] [--tokens 128] [--json FILE]

One process loads the model (see :mod:`tests.benchmarks.speculation` for how it is made) and plays
the same waves of requests without speculation and with it, in turns, through the engine's
scheduler. Both use the same weights at the same addresses and choose the same tokens, which is
checked: the ratios are free of what two servers differ by, and of their routers and clients, which
share the cores with them. The first wave of each kind is not counted.

``wave`` compares the time from the first token to the last one of a wave, which ends with its
slowest stream; ``streams`` the rates of its streams (the mean of the ratios). Both vary by several
percent from wave to wave. ``by steps`` does not: it compares the sums over all steps that only
decode, each taken to last as long as the median of those with as many sequences and draft rows.
``host`` is the share of the time in which steps are scheduled, less that without speculation.

The second table has the steps of full waves that only decode, by their number of draft rows: their
durations as a multiple of the steps of the same waves without speculation (median and mean), what
was expected of them, and the drafts that were accepted in each. Those of no rows show what
speculation costs where it verifies nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tests.benchmarks.draft_texts import WORKLOADS, Texts
from tests.benchmarks.peers.machine import Clock, description
from tgi_cli.config import ServeConfig
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.speculation.adaptive import AdaptiveSpeculator
from tgi_cli.engine.speculation.lookup import GrammarDrafter, LookupDrafter
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import StepTime
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.worker import ModelWorker


class PlayedStep(NamedTuple):
    """A step that only decoded, and what was expected of it."""

    sequences: int
    drafts: int
    accepted: int
    seconds: float
    scheduling: float
    expected: float
    """In steps without drafts."""


@dataclass
class Wave:
    """What a wave took."""

    seconds: float = 0.0
    rates: list[float] = field(default_factory=list)
    """Tokens per second of each stream."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    steps: list[PlayedStep] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0


class Player:
    """Plays waves through a scheduler of its own.

    Args:
        worker: shared with other players, which never play at the same time.
        limits: of the scheduler.
        times: durations of steps, measured at warm-up.
        most: most drafts of a sequence in a step; 0 for no speculation.
    """

    def __init__(
        self, worker: ModelWorker, limits: SchedulerConfig, times: tuple[StepTime, ...], most: int
    ) -> None:
        self._worker = worker
        self._costs: StepCosts | None = None
        speculator = None
        if most:
            self._costs = StepCosts(times, most)
            drafters = GrammarDrafter(), LookupDrafter(shares_answers=False)
            speculator = AdaptiveSpeculator(most, self._costs, drafters)
        self._scheduler = Scheduler(limits, speculator=speculator)
        self._requests = 0

    def play(self, wave: list[dict[str, Any]]) -> Wave:
        """Run requests that arrive at once, to their ends."""
        first = self._requests
        self._requests += len(wave)
        for number, body in enumerate(wave, first):
            sampling = SamplingParams(temperature=body["temperature"], seed=body["seed"])
            request = GenerationRequest(
                request_id=number,
                prompt_ids=tuple(body["prompt"]),
                sampling=sampling,
                max_new_tokens=body["max_tokens"],
            )
            refused = self._scheduler.add(request)
            if refused is not None:
                raise RuntimeError(refused)
        played, scheduler = Wave(), self._scheduler
        began: dict[int, float] = {}
        ended: dict[int, float] = {}
        while len(ended) < len(wave):
            at = time.perf_counter()
            step = scheduler.schedule()
            assert step is not None
            scheduled = time.perf_counter()
            result = self._worker.sample(self._worker.launch(step)).wait()
            outputs = scheduler.update(result)
            now = time.perf_counter()
            count, drafts, expected = step.num_decodes, step.num_drafts, 1.0
            accepted = sum(each.accepted for each in outputs.drafts)
            played.drafted += drafts
            played.accepted += accepted
            decodes = 0 < count == len(step.rows) and not step.new
            if decodes and drafts and self._costs is not None:
                costs = self._costs.of(count, sum(step.starts) // count)
                expected = costs.durations[drafts]
            scheduler.batch.timed(step, result, time.perf_counter() - at)
            for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
                began.setdefault(request_id, now)
                played.tokens.setdefault(request_id - first, []).append(token)
            for finished in outputs.finished:
                ended[finished.request_id] = now
            if decodes:
                taken = time.perf_counter() - at
                found = PlayedStep(count, drafts, accepted, taken, scheduled - at, expected)
                played.steps.append(found)
        played.seconds = max(ended.values()) - min(began.values())
        played.rates = [
            (body["max_tokens"] - 1) / (ended[number] - began[number])
            for number, body in enumerate(wave, first)
        ]
        return played


def loaded(options: argparse.Namespace) -> tuple[ModelWorker, SchedulerConfig, Any]:
    """The model, warmed up, the limits, and the durations of steps."""
    serve = ServeConfig(
        model_id=str(options.model), speculate=options.most, max_batch_size=max(options.clients)
    )
    worker, _ = load_worker(serve, options.model)
    assert isinstance(worker, ModelWorker)
    found = worker.warmup()
    limits = SchedulerConfig.of(
        found.config, found.num_blocks, found.kv_window, step_seconds=found.step_seconds
    )
    # The blocks of one scheduler are overwritten by the other.
    return worker, replace(limits, prefix_caching=False), found.step_times


def print_rates(rows: list[dict[str, Any]]) -> None:
    """Print a row for each workload and number of clients."""
    columns = ("off tok/s", "wave", "streams", "by steps", "accepted", "a step", "host")
    print(f"\n| workload | clients | {' | '.join(columns)} |")
    print("|---" * (2 + len(columns)) + "|")
    for row in rows:
        share = f"{row['accepted'] / row['drafted']:.0%}" if row["drafted"] else "-"
        wave = f"{row['wave']:.3f} ({min(row['waves']):.2f}-{max(row['waves']):.2f})"
        print(
            f"| {row['workload']} | {row['clients']} | {row['off']:.1f} | {wave} "
            f"| {row['streams']:.3f} | {row['by_steps']:.3f} | {share} of {row['drafted']} "
            f"| {row['a_step']:.2f} | {row['host']:.2%} |"
        )


Steps = tuple[list[PlayedStep], list[PlayedStep]]
"""Those without speculation, and those with it."""


def print_steps(steps: dict[tuple[str, int], Steps]) -> None:
    """Print a row for each number of draft rows."""
    print("\n| workload | clients | rows | steps | median | mean | expected | accepted |")
    print("|---|---|---|---|---|---|---|---|")
    for (workload, clients), (without, played) in steps.items():
        plain = [step.seconds for step in without if step.sequences == clients]
        by_drafts: dict[int, list[PlayedStep]] = defaultdict(list)
        for step in played:
            if step.sequences == clients:
                by_drafts[step.drafts].append(step)
        median, mean = statistics.median(plain), statistics.mean(plain)
        for drafts, found in sorted(by_drafts.items()):
            taken = [step.seconds for step in found]
            print(
                f"| {workload} | {clients} | {drafts} | {len(found)} "
                f"| {statistics.median(taken) / median:.3f} | {statistics.mean(taken) / mean:.3f} "
                f"| {statistics.mean(step.expected for step in found):.3f} "
                f"| {statistics.mean(step.accepted for step in found):.2f} |"
            )


def typical(steps: list[PlayedStep]) -> float:
    """Seconds of some steps, each taken to last as long as the median of those like it."""
    alike: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        alike[step.sequences, step.drafts].append(step.seconds)
    return sum(len(taken) * statistics.median(taken) for taken in alike.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["chat"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=7, help="drafts of a sequence in a step")
    parser.add_argument("--json", type=Path, help="a file for all durations of steps")
    options = parser.parse_args()
    options.model = options.model.absolute()
    texts = Texts(Tokenizer.from_file(str(options.model / "tokenizer.json")), options.seed)
    print(description(), flush=True)
    worker, limits, times = loaded(options)
    off, on = (Player(worker, limits, times, most) for most in (0, options.most))
    gc.collect()
    gc.freeze()
    clock = Clock.read()
    rows: list[dict[str, Any]] = []
    steps: dict[tuple[str, int], Steps] = {}
    for clients in options.clients:
        for workload in options.workloads:
            pairs = []
            for number in range(options.rounds + 1):
                wave = texts.wave(workload, clients, options.tokens, number)
                players = (off, on) if number % 2 else (on, off)
                played = {player: player.play(wave) for player in players}
                if played[off].tokens != played[on].tokens:
                    raise RuntimeError("other tokens with drafts than without")
                if number:
                    pairs.append((played[off], played[on]))
            rows.append(compared(workload, clients, options.tokens, pairs))
            without = [step for wave, _ in pairs for step in wave.steps]
            steps[workload, clients] = without, [step for _, wave in pairs for step in wave.steps]
            print(f"{workload} {clients}: {rows[-1]['by_steps']:.3f}", flush=True)
    print(f"other programs used {clock.read().foreign_since(clock):.0%} of the machine")
    print_rates(rows)
    print_steps(steps)
    if options.json is not None:
        kept = {f"{workload} {count}": found for (workload, count), found in steps.items()}
        content = {"rows": rows, "steps": kept, "times": times}
        options.json.write_text(json.dumps(content))


def compared(
    workload: str, clients: int, tokens: int, pairs: list[tuple[Wave, Wave]]
) -> dict[str, Any]:
    """The figures of some waves without and with speculation."""
    waves = [off.seconds / on.seconds for off, on in pairs]
    streams = [
        with_drafts / without
        for off, on in pairs
        for without, with_drafts in zip(off.rates, on.rates, strict=True)
    ]
    plain = [step for off, _ in pairs for step in off.steps]
    played = [step for _, on in pairs for step in on.steps]
    total = len(pairs) * clients * (tokens - 1)
    accepted = sum(wave.accepted for _, wave in pairs)
    usual = statistics.median(step.scheduling for step in plain)
    host = sum(step.scheduling - usual for step in played)
    return {
        "workload": workload,
        "clients": clients,
        "off": statistics.median(clients * (tokens - 1) / off.seconds for off, _ in pairs),
        "wave": statistics.median(waves),
        "waves": waves,
        "streams": statistics.mean(streams),
        "by_steps": typical(plain) / typical(played),
        "drafted": sum(wave.drafted for _, wave in pairs),
        "accepted": accepted,
        "a_step": total / max(1, total - accepted),
        "host": host / sum(step.seconds for step in played),
    }


if __name__ == "__main__":
    main()
