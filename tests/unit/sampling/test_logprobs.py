"""The likeliest tokens do not depend on the batch, also where logits are equal."""

from __future__ import annotations

import pytest
import torch

from tgi_cli.sampling.logprobs import likeliest, likeliest_by_keys


def oracle(row: list[float], count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda index: (-row[index], index))[:count]


@pytest.mark.parametrize("find", [likeliest, likeliest_by_keys])
@pytest.mark.parametrize("count", [0, 1, 5, 20, 64])
def test_equal_logits_are_ordered_by_id(find: object, count: int) -> None:
    torch.manual_seed(count)
    logits = (torch.randn(40, 64) * 2).round() / 2  # a dozen values, and both zeros
    logits[0] = 0.0
    logits[1, ::2] = -0.0
    logits[2, 3:] = float("-inf")
    found = find(logits, count).tolist()  # type: ignore[operator]
    assert found == [oracle(row, count) for row in logits.tolist()]


def test_the_likeliest_tokens_of_a_row_do_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(32, 5_000).bfloat16().float()
    together = likeliest(logits, 20)
    for index, row in enumerate(logits):
        assert torch.equal(likeliest(row[None], 20)[0], together[index])
