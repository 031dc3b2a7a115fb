"""Times of a device's work in a CUDA graph, as decodes are served."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tgi_cli.worker.graph_capture import cuda_graphs

REPEATS = 5


def graph_seconds(works: Sequence[Callable[[], torch.Tensor]]) -> float:
    """The least seconds of a work, on average over several in one graph.

    Raises:
        Exception: what a work or its capture raises.
    """

    def all_works() -> torch.Tensor:
        for work in works:
            last = work()
        return last

    all_works()  # what is loaded or compiled at first use cannot be captured
    graph = cuda_graphs()()
    graph.capture(all_works)
    times: list[float] = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times[1:]) / len(works)
