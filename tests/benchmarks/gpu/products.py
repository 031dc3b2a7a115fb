"""Products of few rows with a model's dense weights, in each way, against reading the weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.benchmarks.gpu.sections import Call
from tgi_cli.device.distributed import ALONE
from tgi_cli.models import CausalLM
from tgi_cli.quantization.few_rows import rows_class
from tgi_cli.worker.sizing.graph_timing import graph_seconds
from tgi_cli.worker.sizing.product_choice import (
    NAMES,
    PRODUCTS_PER_GRAPH,
    dense_layers,
    fastest,
    measure,
)

ROWS = (1, 8, 32, 64)


@torch.inference_mode()
def product_rows(call: Call, model: CausalLM) -> list[dict[str, Any]]:
    """A row per shape of weights and number of rows; none without a GPU.

    Times are of a product and the gate before it, in a graph, as warm-up measures them; the
    roofline is the time to read the weight, and the ratio is of the fastest product, without the
    gate's own time: if it begins early, some of that is hidden.
    """
    from tgi_cli.layers.triton_ops import gated

    found = []
    for (outputs, inputs, bias), layers in dense_layers(model, ALONE).items():
        weight = layers[0].weight
        assert weight is not None
        roofline = weight.nbytes / call.device.bandwidth
        few_rows = layers[0].few_rows
        for rows in ROWS:
            times = measure(layers, rows, graph_seconds)
            gates = torch.ones(rows, 2 * inputs, dtype=weight.dtype, device=weight.device)
            gate = graph_seconds([partial(gated, gates, "silu")] * PRODUCTS_PER_GRAPH)
            chosen = None
            if few_rows is not None:
                chosen = few_rows.dependent.get(rows_class(rows))
            found.append(
                {
                    "weight": f"[{outputs}, {inputs}]" + ", bias" * bias,
                    "rows": rows,
                    "gate us": 1e6 * gate,
                    **{
                        f"{name}, us": 1e6 * times[way]
                        for way, name in NAMES.items()
                        if way in times
                    },
                    "roofline us": 1e6 * roofline,
                    "ratio": (times[fastest(times)] - gate) / roofline,
                    "served by": NAMES[chosen],
                }
            )
    return found
