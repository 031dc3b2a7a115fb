from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.unit.worker.fakes import CPU, new_row, step_of
from tgi_cli.engine.step import BlockAppend, TokenAppend
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.upload import Uploader


@pytest.mark.parametrize("shared", [False, True])
def test_only_differences_are_written_and_both_tables_agree(shared):
    rows = InputBatch(4, 30, 4, Uploader(CPU, packed=not shared))
    assert (rows.blocks.data_ptr() == rows.host_blocks.ctypes.data) == shared
    rows.apply(step_of(new=[new_row(2, [7, 8, 9], [5, 6]), new_row(0, [1], [9])]))
    rows.apply(step_of(appended=[BlockAppend(2, 2, [1, 3]), BlockAppend(0, 1, [4])]))
    rows.apply(step_of(freed=[0], new=[new_row(0, [2, 2], [8])]))
    assert rows.tokens[2, :3].tolist() == [7, 8, 9]
    assert rows.tokens[0, :2].tolist() == [2, 2]
    assert rows.host_blocks[2, :4].tolist() == [5, 6, 1, 3]
    assert rows.host_blocks[0, 0] == 8
    assert np.array_equal(rows.blocks.numpy(), rows.host_blocks)


@pytest.mark.parametrize("packed", [False, True])
def test_forced_tokens_are_written_at_their_positions(packed):
    rows = InputBatch(3, 12, 4, Uploader(CPU, packed=packed))
    rows.apply(step_of(new=[new_row(1, [7, 8, 9], [5])]))
    rows.write(torch.tensor([rows.width + 3]), torch.tensor([99]))
    given = [TokenAppend(1, 3, [10, 11])]
    rows.apply(step_of(forced_tokens=given, new=[new_row(2, [1, 2], [6])]))
    assert rows.tokens[1, :6].tolist() == [7, 8, 9, 10, 11, 0]
    assert rows.tokens[2, :3].tolist() == [1, 2, 0]
    rows.apply(step_of(forced_tokens=[TokenAppend(1, 5, [12])]))
    assert rows.tokens[1, :7].tolist() == [7, 8, 9, 10, 11, 12, 0]


class Counted(Uploader):
    """Counts transfers."""

    transfers = 0

    def __call__(self, *arrays):
        self.transfers += 1
        return super().__call__(*arrays)


class OnDevice(InputBatch):
    """Tokens are not the host's to write."""

    def __init__(self, *given):
        super().__init__(*given)
        self._on_host = None


def test_what_a_step_changes_on_a_device_is_one_transfer():
    upload = Counted(CPU, packed=True)
    rows = OnDevice(3, 12, 4, upload)
    rows.apply(step_of(new=[new_row(1, [7, 8, 9], [5, 6]), new_row(0, [1], [9])]))
    given = [TokenAppend(1, 3, [10, 11])]
    appended = [BlockAppend(0, 1, [4]), BlockAppend(1, 2, [3])]
    rows.apply(step_of(forced_tokens=given, new=[new_row(2, [1, 2], [7])], appended=appended))
    assert upload.transfers == 2
    rows.write(torch.tensor([rows.scratch]), torch.tensor([99]))
    assert rows.tokens[:, :6].tolist() == [[1] + [0] * 5, [7, 8, 9, 10, 11, 0], [1, 2] + [0] * 4]
    assert rows.blocks.tolist() == [[9, 4, 0, 0], [5, 6, 3, 0], [7, 0, 0, 0]]
    assert np.array_equal(rows.blocks.numpy(), rows.host_blocks)


def test_a_row_is_one_token_longer_than_the_context():
    rows = InputBatch(2, 8, 4, Uploader(CPU))
    rows.apply(step_of(new=[new_row(1, range(8), [0, 1])]))
    assert rows.tokens.shape == (2, 9)
    assert rows.tokens[1].tolist() == [*range(8), 0]


LONG_CONTEXT = """
import resource
from pathlib import Path

from tests.unit.worker.fakes import CPU, new_row, step_of
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.upload import Uploader

def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()

before = resident_bytes()
rows = InputBatch(128, 1 << 22, 16, Uploader(CPU))
rows.apply(step_of(new=[new_row(5, [7], [0])]))
assert rows.tokens.nbytes > 1 << 31
grown = resident_bytes() - before
assert grown < 64 << 20, grown
"""


def test_rows_of_a_long_context_take_memory_as_they_are_written():
    # In a process of its own: malloc writes zeros to memory that other tests have freed.
    done = subprocess.run(
        [sys.executable, "-c", LONG_CONTEXT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
