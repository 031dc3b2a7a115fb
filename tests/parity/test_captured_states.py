"""The inputs of layers, which draft heads read, are transformers' hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.cases import CASES
from tests.parity.families import make_checkpoint
from tests.tools.paged_run import CPU, make_metadata, random_ids
from tgi_cli.attention import create_attention
from tgi_cli.kernels import cpp_library
from tgi_cli.models import load_model, read_config
from tgi_cli.models.base import CapturedStates, CausalLM
from tgi_cli.models.cpu_program import CpuProgram, compile_program

COUNT = 23
LAYERS = (3, 0, 1)
"""The last one's output, the embeddings, and in between; not in their order."""


def captured(
    model: CausalLM, dtype: torch.dtype, backend: str, program: bool = False
) -> tuple[Tensor, Tensor]:
    """Hidden states, and the captured ones, of a text in one step."""
    attention = create_attention(backend, model.kv_specs, 16, dtype, CPU)
    attention.allocate(8)
    runs: CausalLM | CpuProgram = model
    if program:
        compiled = compile_program(model, attention, LAYERS)
        assert compiled is not None
        runs = compiled
    states = CapturedStates(LAYERS)
    with torch.inference_mode():
        attention.plan(make_metadata([[5, 2]], [COUNT], [COUNT], 16))
        ids, positions = torch.tensor(random_ids(COUNT, 1)), torch.arange(COUNT)
        hidden = runs.forward_capturing(ids, positions, attention, states)
        attention.plan(make_metadata([[5, 2]], [COUNT], [COUNT], 16))
        assert torch.equal(hidden, runs.forward(ids, positions, attention))
    return hidden, states.joined()


@pytest.mark.parametrize("name", ["Llama 3", "Gemma 2", "GPT-NeoX", "Mixtral", "Granite"])
def test_they_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(CASES[name], tmp_path)
    theirs: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    inputs: dict[int, Tensor] = {}
    layers = theirs.base_model.layers
    last = len(layers)
    hooks = [
        layer.register_forward_hook(
            lambda module, given, output, index=index: inputs.update(
                {index: given[0][0], index + 1: (output if torch.is_tensor(output) else output[0])}
            )
        )
        for index, layer in enumerate(layers)
    ]
    with torch.inference_mode():
        theirs(torch.tensor([random_ids(COUNT, 1)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    model = load_model(read_config(path), torch.float32, CPU)
    assert model.captures_states
    _, found = captured(model, torch.float32, "cpu")
    wanted = [inputs[layer].view(COUNT, -1) for layer in LAYERS if layer <= last]
    torch.testing.assert_close(found, torch.cat(wanted, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama 3", "Gemma 2", "GPT-NeoX", "Mixtral", "Granite"])
def test_a_program_captures_what_modules_do(name: str, tmp_path: Path) -> None:
    if cpp_library() is None:
        pytest.skip("the kernels are not compiled: there is no C++ compiler here")
    path = make_checkpoint(CASES[name], tmp_path)
    model = load_model(read_config(path), torch.bfloat16, CPU)
    hidden, found = captured(model, torch.bfloat16, "native", program=True)
    expected, states = captured(model, torch.bfloat16, "native")
    assert torch.equal(hidden, expected)
    assert torch.equal(found, states)
