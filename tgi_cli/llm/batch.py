"""Many requests at once: submit all, wait for all, hand out what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tgi_cli.llm.collector import Collector
from tgi_cli.llm.engine import InProcessEngine, RequestGroup
from tgi_cli.llm.options import GenerationOptions
from tgi_cli.llm.outputs import Completion
from tgi_cli.llm.progress import RequestProgress


def run(engine: InProcessEngine, collectors: Sequence[Collector], progress: bool | None) -> None:
    """Submit everything and wait for all of it; leaving early cancels what is live.

    Raises:
        EngineDeadError: the engine's loop has ended.
    """
    by_id = {collector.request.request_id: collector for collector in collectors}
    with RequestGroup(engine) as call, RequestProgress(len(collectors), progress) as bar:
        for collector in collectors:
            call.submit(collector.request)
        while call.live:
            taken = given = done = 0
            for update in call.receive():
                collector = by_id[update.request_id]
                piece = collector.take(update)
                if update.started is not None:
                    taken += len(collector.prompt.ids)
                given += len(piece.token_ids)
                if piece.finish_reason is not None:
                    done += 1
                    call.drop(update.request_id)
            bar.add(taken, given, done)


def completions_of(collectors: Sequence[Collector], options: GenerationOptions) -> list[Completion]:
    """What is returned of all prompts: n for each, one prompt after another."""
    completions: list[Completion] = []
    for start in range(0, len(collectors), options.samples):
        completions += _of_prompt(collectors[start : start + options.samples], options)
    return completions


def _of_prompt(group: Sequence[Collector], options: GenerationOptions) -> list[Completion]:
    every = [collector.completion(group[0]) for collector in group]
    if options.samples == options.n:
        return every
    best = sorted(every, key=lambda completion: -completion.mean_logprob)[: options.n]
    return [replace(completion, index=index) for index, completion in enumerate(best)]
