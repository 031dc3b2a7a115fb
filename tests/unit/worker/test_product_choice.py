"""Who multiplies dense weights with few rows, with stand-ins for kernels and times."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.tools.checkpoints import make_llama
from tgi_cli.config import ServeConfig
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.layers import Build, ColumnParallelLinear, Projection, ReplicatedLinear
from tgi_cli.layers.linear import LinearBase
from tgi_cli.models import CausalLM, load_model, read_config
from tgi_cli.quantization import Unquantized
from tgi_cli.quantization.few_rows import FewRows
from tgi_cli.worker import factory
from tgi_cli.worker.sizing import product_choice
from tgi_cli.worker.sizing.product_choice import Way, choose_products, dense_layers, fastest
from tgi_cli.worker.worker import ModelWorker

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ERRORS: dict[Way, Callable[[Tensor], Tensor]] = {}
"""What each way makes of its products, if not the right ones."""


def gated_product(layer: LinearBase, way: Way, gates: Tensor) -> Tensor:
    gate, up = gates.chunk(2, -1)
    assert layer.weight is not None
    product: Tensor = linear(torch.nn.functional.silu(gate) * up, layer.weight, layer.bias)
    error = ERRORS.get(way)
    return product if error is None else error(product)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    from tgi_cli.device import dependent_launch

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(dependent_launch, "has_dependent_launch", lambda device: True)
    monkeypatch.setattr(product_choice, "gated_product", gated_product)
    monkeypatch.setattr(product_choice, "release_unused_memory", lambda device: None)
    ERRORS.clear()
    yield
    ERRORS.clear()


@pytest.fixture
def model(tmp_path: Path) -> CausalLM:
    made = load_model(read_config(make_llama(tmp_path)), torch.float16, CPU, load_format="dummy")
    assert isinstance(made, CausalLM)
    return made


Times = Callable[[Way, int], float]
"""Of a way and a number of rows."""


def timed(times: Times) -> product_choice.Seconds:
    def seconds(works: Sequence[Callable[[], Tensor]]) -> float:
        given: Any = works
        layers = [work.args[0] for work in given]
        shape = layers[0].weight.shape
        assert all(layer.weight.shape == shape for layer in layers)
        _, way, gates = given[0].args
        assert works[0]().shape == (len(gates), shape[0])
        return times(way, len(gates))

    return seconds


def chosen(model: CausalLM, times: Times) -> FewRows | None:
    """What the first layer's products are computed by, and all others'."""
    choose_products(model, torch.float16, CUDA, ALONE, timed(times))
    layers = [layer for layers in dense_layers(model, ALONE).values() for layer in layers]
    assert len(layers) > 4
    assert all(layer.few_rows == layers[0].few_rows for layer in layers)
    return layers[0].few_rows


def test_each_number_of_rows_is_computed_in_the_fastest_way(
    model: CausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    def times(way: Way, rows: int) -> float:
        if way is None:
            return 1e-5
        if way is False:
            return 8e-6 if rows <= 16 else 2e-5
        return 7e-6 if rows in (1, 32) else 9e-6 if rows <= 16 else 2e-5

    expected = {0: True, 1: False, 2: False, 3: False, 4: False, 5: True}
    assert chosen(model, times) == FewRows(expected)
    assert "1 10.0, 8.0, 7.0 (our kernel begun early)" in caplog.text
    assert "16 10.0, 8.0, 9.0 (our kernel)" in caplog.text
    assert "64 10.0, 20.0, 20.0 (cuBLAS)" in caplog.text


def test_cublas_computes_what_it_computes_as_fast(model: CausalLM) -> None:
    assert chosen(model, lambda way, rows: 1.0 if way is None else 0.98) is None
    assert fastest({None: 1.0, False: 0.9, True: 0.89}) is False
    assert fastest({None: 1.0, True: 0.9}) is True
    assert fastest({None: 1.0}) is None


def test_weights_are_measured_in_turn(model: CausalLM) -> None:
    """Or they would be in a cache, where a served model does not find them."""
    measured: set[int] = set()

    def seconds(works: Sequence[Callable[[], Tensor]]) -> float:
        given: Any = works
        measured.update(id(work.args[0]) for work in given)
        return 1.0

    choose_products(model, torch.float16, CUDA, ALONE, seconds)
    layers = [layer for layers in dense_layers(model, ALONE).values() for layer in layers]
    assert measured == {id(layer) for layer in layers}
    assert max(len(layers) for layers in dense_layers(model, ALONE).values()) > 1


def wrong(product: Tensor) -> Tensor:
    product[..., -1] += 1
    return product


def missing(product: Tensor) -> Tensor:
    return product.fill_(float("nan"))


def failing(product: Tensor) -> Tensor:
    raise RuntimeError("no kernel for this GPU\nin two lines")


@pytest.mark.parametrize("how", [wrong, missing, failing])
def test_a_way_that_does_not_compute_products_is_left_out(
    how: Callable[[Tensor], Tensor], model: CausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    """Though it would be faster."""

    def times(way: Way, rows: int) -> float:
        return {None: 1.0, False: 0.5, True: 0.1}[way]

    every = range(7)
    ERRORS[True] = how
    assert chosen(model, times) == FewRows(dict.fromkeys(every, False))
    assert "no products of few rows by our kernel begun early: RuntimeError" in caplog.text
    assert "in two lines" not in caplog.text
    ERRORS[False] = how
    assert chosen(model, times) is None
    del ERRORS[True]
    assert chosen(model, times) == FewRows(dict.fromkeys(every, True))


def test_a_graph_that_cannot_hold_an_early_launch(model: CausalLM) -> None:
    def times(way: Way, rows: int) -> float:
        if way is True:
            raise RuntimeError("operation not permitted when stream is capturing")
        return 1.0 if way is None else 0.5

    assert chosen(model, times) == FewRows(dict.fromkeys(range(7), False))


def test_kernels_do_not_begin_early_where_a_gpu_cannot(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tgi_cli.device import dependent_launch

    monkeypatch.setattr(dependent_launch, "has_dependent_launch", lambda device: False)

    def times(way: Way, rows: int) -> float:
        assert way is not True
        return 1.0 if way is None else 0.5

    assert chosen(model, times) == FewRows(dict.fromkeys(range(7), False))


def never(works: Sequence[Callable[[], Tensor]]) -> float:
    raise AssertionError


@pytest.mark.parametrize(
    ("dtype", "device", "change"),
    [
        (torch.float16, CPU, {}),
        (torch.float32, CUDA, {}),
        (torch.float16, CUDA, {"custom_kernels_enabled": lambda: False}),
        (torch.float16, CUDA, {"triton_missing": lambda: "there is no Triton"}),
    ],
)
def test_nothing_is_measured_without_our_kernels(
    dtype: torch.dtype,
    device: torch.device,
    change: dict[str, Any],
    model: CausalLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(product_choice, name, value)
    choose_products(model, dtype, device, ALONE, never)
    assert all(layer.few_rows is None for layer in model.modules() if isinstance(layer, LinearBase))


def test_a_loaded_model_is_measured_before_its_worker_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(factory, "choose_products", lambda *given: measured.append(given))
    serve = ServeConfig(model_id="tiny", dtype="bfloat16", max_total_tokens=64)
    worker, _ = factory.load_worker(serve, make_llama(tmp_path))
    assert isinstance(worker, ModelWorker)
    worker.close()
    assert measured == [(worker.model, torch.bfloat16, CPU, ALONE)]


def test_layers_that_all_shards_have_whole_are_cublas() -> None:
    """Each shard chooses by itself, and their results have to be the same."""
    build = Build(torch.float16, Unquantized())
    halved = replace(build, shard=Shard(1, 2))

    def layers(shard: Shard) -> list[list[LinearBase]]:
        model: Any = torch.nn.ModuleList(
            [
                ReplicatedLinear(halved, 64, 32, bias=False),
                ColumnParallelLinear(halved, 64, {"": Projection(64)}, bias=True),
                ColumnParallelLinear(build, 64, {"": Projection(48)}, bias=False),
                ColumnParallelLinear(halved, 65, {"": Projection(64)}, bias=False),
            ]
        )
        return list(dense_layers(model, shard).values())

    assert [[layer.out_features for layer in each] for each in layers(ALONE)] == [[32], [32], [48]]
    assert [[layer.out_features for layer in each] for each in layers(Shard(1, 2))] == [[32]]
