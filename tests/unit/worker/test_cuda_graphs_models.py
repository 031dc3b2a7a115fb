"""Do models ask the device for anything in a decode step? A graph could not hold it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.families import make_checkpoint
from tests.parity.test_fallback import CASES
from tests.tools.checkpoints import make_llama
from tests.tools.paged_run import load
from tests.unit.worker.fake_graphs import PaddedAttention, RecordedGraph
from tests.unit.worker.fakes import CPU
from tgi_cli.layers import rotary


@pytest.mark.parametrize("name", ["Llama, defined here", "Phi", "OLMoE", "Helium, dynamic"])
def test_a_forward_can_be_captured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that transformers defines, too: its rotary embeddings and experts among them."""
    monkeypatch.setattr(rotary, "TABLE_POSITIONS", 0)  # a GPU computes the angles
    if name in CASES:
        path = make_checkpoint(CASES[name], tmp_path / "model")
    else:
        path = make_llama(tmp_path / "model")
    model = load(path)
    attention = PaddedAttention(model.kv_specs, 16, torch.float32, CPU)
    attention.allocate(4)
    attention.decode_buffers(4, 4)
    attention.plan_padded(None, 4)
    zeros = torch.zeros(4, dtype=torch.int64)
    with torch.inference_mode():
        model.forward(zeros, zeros, attention)
        logits = RecordedGraph().capture(
            lambda: model.logits(model.forward(zeros, zeros, attention))
        )
    assert logits.shape[0] == 4
    assert logits.isfinite().all(), "padding makes no NaN that experts or norms could spread"
