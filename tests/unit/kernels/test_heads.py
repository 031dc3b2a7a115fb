from __future__ import annotations

import pytest
import torch

from tgi_cli.kernels import library
from tgi_cli.kernels.heads import HeadMatrices, heads_linear

pytestmark = pytest.mark.usefixtures("level")


@pytest.mark.parametrize(
    ("heads", "inputs", "out"), [(1, 16, 32), (5, 24, 20), (16, 128, 512), (64, 16, 32)]
)
def test_each_head_has_a_matrix_of_its_own(heads: int, inputs: int, out: int) -> None:
    torch.manual_seed(5)
    weights = torch.randn(heads, out, inputs).bfloat16()
    matrices = HeadMatrices.pack(weights)
    # Between heads stands something else.
    x = torch.randn(130, heads, inputs + 16).bfloat16()[..., :inputs]
    together = heads_linear(x, matrices)
    wanted = torch.einsum("thi,hoi->tho", x.double(), weights.double())
    torch.testing.assert_close(together.double(), wanted, atol=2**-6, rtol=2**-8)
    for rows in (1, 3, 17, 49):
        assert torch.equal(heads_linear(x[:rows], matrices), together[:rows])
    library.set_threads(3)
    assert torch.equal(heads_linear(x, matrices), together)
