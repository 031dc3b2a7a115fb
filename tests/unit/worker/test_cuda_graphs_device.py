"""The same on a device: real graphs, and that the host never waits for it but for results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.unit.worker.fake_graphs import Syncing
from tests.unit.worker.fakes import run
from tests.unit.worker.test_cuda_graphs import GREEDY, Workload, everything, make_runner
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.cuda_graphs import DecodeGraphs
from tgi_cli.worker.graph_capture import CudaGraph, cuda_graphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CUDA = torch.device("cuda", 0)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_is_repeated_on_the_same_memory():
    graph: CudaGraph = cuda_graphs()()  # type: ignore[assignment]
    source = torch.ones(8, device=CUDA)
    output = graph.capture(lambda: source * 2)
    source.fill_(5)
    graph.replay()
    assert output.tolist() == [10.0] * 8


@pytest.mark.parametrize("sampling", [lambda row: GREEDY, everything])
def test_replayed_steps_generate_what_eager_steps_do(sampling):
    results = []
    for sizes in (None, [1, 2, 4, 8]):
        runner, _, _ = make_runner(sizes, CUDA, cuda_graphs)
        workload = Workload(1, sampling)
        results.append([run(runner, workload.prompts(10))])
        for _ in range(25):
            results[-1].append(run(runner, workload.decodes(workload.random.randint(1, 10))))
    for launched, replayed in zip(*results, strict=True):
        assert replayed.token_ids == launched.token_ids
        assert replayed.logprobs == pytest.approx(launched.logprobs, abs=1e-3)


@pytest.mark.parametrize("graphs", [[1, 2, 4, 8], None])
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(seed=1, temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, typical_p=0.9),
        SamplingParams(
            temperature=0.0,
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            relative_frequency_penalty=0.2,
            watermark=True,
            top_logprobs=3,
        ),
    ],
)
def test_the_host_waits_for_results_alone(graphs, sampling):
    """The first round takes memory and compiles; the second may do nothing that waits."""
    runner, _, _ = make_runner(graphs, CUDA, cuda_graphs)
    for guard in (None, no_waiting()):
        workload = Workload(3, lambda row: sampling)
        pending = []
        with guard or torch.inference_mode():
            pending.append(runner.sample(runner.launch(workload.prompts(6))))
            for _ in range(8):
                pending.append(runner.sample(runner.launch(workload.decodes(5))))
                assert len(pending.pop(0).wait().token_ids) in (5, 6)


def test_a_failed_capture_leaves_the_device_usable():
    runner, attention, _ = make_runner(None, CUDA)
    model = Syncing(97, device=CUDA)
    graphs = DecodeGraphs(model, attention, runner.rows, 97, [2], cuda_graphs)
    with pytest.raises(RuntimeError):
        graphs.capture()
    graphs.drop()
    workload = Workload(2, lambda row: GREEDY)
    assert len(run(runner, workload.prompts(3)).token_ids) == 3
