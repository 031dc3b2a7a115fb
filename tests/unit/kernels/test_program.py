"""A program's own memory: enough for each step, and no more than the latest ones need."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tgi_cli.kernels import cpp_library
from tgi_cli.kernels.linear import Epilogue, linear, pack_bf16
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.kernels.program import Program
from tgi_cli.kernels.program_args import ProgramInputs, RunArgs, rope_pointers
from tgi_cli.kernels.program_parts import BufferView

WIDTH, WIDE, PROMPT = 64, 8192, 3000
RESIDUAL, OUTPUT = BufferView(0), BufferView(1)


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if cpp_library() is None:
        pytest.skip("the kernels are not compiled: there is no C++ compiler here")


@pytest.fixture
def matrices() -> tuple[PackedMatrix, PackedMatrix]:
    torch.manual_seed(0)
    up, down = torch.randn(WIDE, WIDTH), torch.randn(WIDTH, WIDE)
    return pack_bf16(up.bfloat16()), pack_bf16(down.bfloat16())


@pytest.fixture
def program(matrices: tuple[PackedMatrix, PackedMatrix]) -> Program:
    made = Program(WIDTH)
    between = made.buffer(WIDE)
    made.linear("up", RESIDUAL, between, matrices[0], None, epilogue=Epilogue.STORE)
    made.linear("down", between, OUTPUT, matrices[1], None, epilogue=Epilogue.STORE)
    made.seal()
    return made


def run(program: Program, x: Tensor) -> Tensor:
    inputs = ProgramInputs(step=RunArgs(), caches=(ctypes.c_void_p * 1)(), ropes=rope_pointers([]))
    return program.run(x.clone(), inputs)


def resident() -> float:
    """MB of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps_rollup")
def test_what_a_prompt_takes_goes_back_after_some_decodes(
    program: Program, matrices: tuple[PackedMatrix, PackedMatrix]
) -> None:
    prompt = torch.randn(PROMPT, WIDTH).bfloat16()
    expected = linear(linear(prompt, matrices[0]), matrices[1])
    size = PROMPT * WIDE * 2 / 1e6
    run(program, prompt[:8])
    before = resident()
    assert torch.equal(run(program, prompt), expected)
    assert resident() - before > 0.8 * size
    for _ in range(4):  # and a longer step now and then keeps it
        for _ in range(10):
            assert torch.equal(run(program, prompt[:8]), expected[:8])
        assert torch.equal(run(program, prompt[: PROMPT // 2]), expected[: PROMPT // 2])
    assert resident() - before > 0.8 * size
    for count in range(1, 30):
        assert torch.equal(run(program, prompt[:count]), expected[:count])
    assert resident() - before < 0.3 * size
    for count in (300, PROMPT, 1):
        assert torch.equal(run(program, prompt[:count]), expected[:count])
