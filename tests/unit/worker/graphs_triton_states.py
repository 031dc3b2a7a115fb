"""Collected by test_cuda_graphs_triton.py under Triton's interpreter: miniatures with states.

Decode graphs run Triton's kernels of convolutions, linear attention, Mamba-2 and attention. What
they are compared with are operations of torch, eagerly.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.cases import CASES
from tests.parity.families import make_checkpoint
from tests.tools.paged_run import load
from tests.unit.worker.fakes import CPU, new_row, run, step_of
from tests.unit.worker.graphs_triton import BLOCK, Again
from tgi_cli.attention import StateCache
from tgi_cli.attention.reference import ReferenceAttention
from tgi_cli.attention.triton import TritonAttention
from tgi_cli.kernels import without_cpp_kernels
from tgi_cli.layers import recurrent, triton_recurrent
from tgi_cli.models import CausalLM
from tgi_cli.worker.cuda_graphs import DecodeGraphs
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.upload import Uploader

VOCAB, SLOTS = 256, 8
LENGTHS = (3, 15, 20)


def tokens_of(model: CausalLM, graphs: bool) -> tuple[list[list[int]], StateCache]:
    """Tokens of prompts that share a step, and of decodes whose rows change their slots."""
    kind = TritonAttention if graphs else ReferenceAttention
    rows = InputBatch(4, 64, BLOCK, Uploader(CPU, packed=True))
    attention = kind(model.kv_specs, BLOCK, torch.float32, CPU)
    attention.allocate(12)
    states = attention.states = StateCache(model.state_specs, CPU)
    states.allocate(SLOTS)
    for tensors in states.tensors:
        for tensor in tensors.values():
            tensor.fill_(torch.nan)
    runner = ModelRunner(model, attention, rows, VOCAB)
    new = [
        new_row(row, [7 * row + i for i in range(length)], [3 * row, 3 * row + 1, 3 * row + 2])
        for row, length in enumerate(LENGTHS)
    ]
    prefill = step_of(*((row, 0, n, True) for row, n in enumerate(LENGTHS)), new=new)
    prefill.state_in, prefill.state_out = [-1] * 3, [0, 1, 2]
    found = [run(runner, prefill).token_ids]
    if graphs:
        runner.graphs = DecodeGraphs(
            model, attention, rows, VOCAB, [4], lambda: lambda: Again(attention, states)
        )
        runner.graphs.capture()
    slots = {0: 0, 1: 1, 2: 2}
    for step, batch in enumerate(([2, 0, 1], [1, 0, 2], [0, 2])):
        decode = step_of(*((row, LENGTHS[row] + step, 1, True) for row in batch))
        decode.state_in = [slots[row] for row in batch]
        if step == 1:
            slots = {0: 4, 1: 5, 2: 2}
        decode.state_out = [slots[row] for row in batch]
        found.append(run(runner, decode).token_ids)
    return found, states


@pytest.mark.parametrize("name", ["Qwen 3.5", "Granite 4"])
def test_steps_with_graphs_give_the_tokens_of_the_reference(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_cpp_kernels():
        model = load(make_checkpoint(CASES[name], tmp_path / "model"))
        expected, wanted = tokens_of(model, graphs=False)
        monkeypatch.setattr(recurrent, "triton_for", lambda *_: triton_recurrent)
        got, states = tokens_of(model, graphs=True)
    assert got == expected
    for ours, theirs in zip(states.tensors, wanted.tensors, strict=True):
        for kind, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[kind], atol=1e-4, rtol=1e-4, equal_nan=True)
