from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tools.checkpoints import make_llama
from tests.tools.paged_run import CPU, load
from tgi_cli.attention import KVSpec, PagedAttention, create_attention
from tgi_cli.attention.reference import ReferenceAttention
from tgi_cli.device.distributed import ALONE
from tgi_cli.worker.sizing import attention_choice
from tgi_cli.worker.sizing.attention_choice import MeasuredLayer, fastest, layer_kinds

KINDS = [MeasuredLayer(KVSpec(2, 8), 4, 0.5), MeasuredLayer(KVSpec(2, 8, 30), 4, 0.5, 20.0, True)]


class Refuses(ReferenceAttention):
    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        raise RuntimeError("no kernel for this GPU\nin two lines")


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "DECODES", ((1, 40), (3, 20)))
    monkeypatch.setattr(attention_choice, "PROMPTS", ((2, 5, 20),))


def make(name: str) -> PagedAttention:
    specs = [kind.spec for kind in KINDS]
    if name == "refuses":
        return Refuses(specs, 16, torch.float32, CPU)
    attention = create_attention("torch", specs, 16, torch.float32, CPU)
    attention.name = name  # type: ignore[attr-defined]
    return attention


def timer(times: dict[str, list[float]]) -> Callable[[PagedAttention, Callable[[], Tensor]], float]:
    """Each step of a backend takes the next of its times, after it has run."""
    left = {name: iter(own) for name, own in times.items()}

    def seconds(attention: PagedAttention, work: Callable[[], Tensor]) -> float:
        assert work().isfinite().all()
        return next(left[attention.name])  # type: ignore[attr-defined]

    return seconds


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        ([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], 1),
        ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], 0),
        # Slower in a long step, and three times as fast in two short ones.
        ([0.003, 0.003, 10.0], [0.001, 0.001, 15.0], 1),
        ([0.003, 0.003, 10.0], [0.004, 0.004, 9.0], 0),
    ],
)
def test_the_fastest_on_average_is_chosen(
    first: list[float], second: list[float], chosen: int
) -> None:
    times = {"first": first, "second": second}
    assert fastest(("first", "second"), make, KINDS, 100, timer(times)) == chosen


def test_a_backend_that_raises_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    times = {"second": [1.0] * 3}
    assert fastest(("refuses", "second"), make, KINDS, 100, timer(times)) == 1
    assert "refuses is not used: RuntimeError: no kernel for this GPU" in caplog.text
    assert "in two lines" not in caplog.text
    assert fastest(("refuses", "refuses"), make, KINDS, 100, timer({})) == 0


def test_steps_are_no_longer_than_what_is_served() -> None:
    lens = []

    def seconds(attention: PagedAttention, work: Callable[[], Tensor]) -> float:
        assert attention.planned is not None
        lens.append((attention.planned.query_lens_host, attention.planned.kv_lens_host))
        work()
        return 1.0

    fastest(("torch",), make, KINDS, 18, seconds)
    assert lens == [([1], [18]), ([1] * 3, [18] * 3), ([5, 5], [18, 18])]


def test_layers_that_agree_are_measured_once(tmp_path: Path) -> None:
    model = load(make_llama(tmp_path, num_hidden_layers=3))
    (kind,) = layer_kinds(model)
    assert kind.spec == model.kv_specs[0]
    assert kind.heads % kind.spec.num_kv_heads == 0
    assert kind.scale == pytest.approx(kind.spec.head_dim**-0.5)
    model.kv_specs = [*model.kv_specs, KVSpec(1, 8)]
    assert layer_kinds(model) == []


def test_nothing_is_measured_without_a_choice(tmp_path: Path) -> None:
    model = load(make_llama(tmp_path))
    chosen = attention_choice.choose_attention(model, torch.float32, CPU, torch.float32, 100, ALONE)
    assert chosen is None
