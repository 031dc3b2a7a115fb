"""The order of servers is balanced, and ranges have the median as often as they say."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest

from tests.benchmarks.paired_servers import Server, median_range, order


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_server_has_each_turn_and_each_predecessor_equally_often(count: int) -> None:
    servers = [Server(str(number), "") for number in range(count)]
    rounds = [[each.name for each in order(servers, number)] for number in range(2 * count)]
    turns = Counter((turn, name) for names in rounds for turn, name in enumerate(names))
    assert set(turns.values()) == {2}
    behind = Counter(pair for names in rounds for pair in pairwise(names))
    assert all(behind[one, other] == behind[other, one] for one, other in behind)


@pytest.mark.parametrize("count", range(2, 12))
def test_the_range_of_a_median_is_as_sure_as_the_values_allow(count: int) -> None:
    """Each value is above the median or below, as a coin falls."""

    def covered(cut: int) -> float:
        falls = list(product((-1, 1), repeat=count))
        return sum(sorted(f)[cut] < 0 < sorted(f)[-1 - cut] for f in falls) / len(falls)

    low, high = median_range(range(count))
    assert high == count - 1 - low
    cut = round(low)
    assert covered(cut) >= 0.9 or cut == 0
    assert covered(cut + 1) < 0.9 or cut + 1 >= count / 2
