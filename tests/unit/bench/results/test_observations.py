"""Latencies of requests and of batches, reckoned by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bench.results.simulation import request
from tgi_cli.bench.events import BatchRecord, BenchRequestRecord
from tgi_cli.bench.statistics.observations import (
    LATENCIES,
    METRICS,
    batch_values,
    latencies_of,
    without_warmup,
)
from tgi_cli.bench.statistics.rates import meets_slo, parse_slo, windows


def test_every_latency_of_one_request() -> None:
    # Due at 0, dispatched at 0.25, tokens at 1, 2 and 4, whole at 4.5.
    observed = latencies_of([request(late=0.25)])
    found = {name: list(values) for name, (values, _) in observed.items()}
    assert found == {
        "late": [250.0],
        "ttft": [750.0],
        "ttft_scheduled": [1000.0],
        "itl": [1000.0, 2000.0],
        "tpot": [1500.0],
        "e2e": [4250.0],
        "e2e_scheduled": [4500.0],
    }
    assert set(found) == set(LATENCIES) <= set(METRICS)


def test_gaps_are_each_counted_and_not_a_mean_of_means() -> None:
    one = request(0, arrivals=(1.0, 1.1, 1.2, 1.3))  # three gaps of 0.1
    two = request(1, arrivals=(1.0, 2.0))  # one of 1.0
    values, clusters = latencies_of([one, two])["itl"]
    assert values == pytest.approx([100, 100, 100, 1000])
    assert list(clusters) == [0, 0, 0, 1]
    assert values.mean() == pytest.approx(325)


def test_an_event_of_several_tokens_ends_one_gap() -> None:
    # One token, then three in one event two seconds later, then two one second later.
    observed = latencies_of([request(arrivals=(1.0, 3.0, 4.0), counts=(1, 3, 2))])
    assert list(observed["itl"].values) == [2000.0, 1000.0]
    assert observed["tpot"].values == pytest.approx([3000 / 5])


def test_tokens_of_the_first_event_do_not_count_for_tpot() -> None:
    assert latencies_of([request(arrivals=(1.0, 3.0), counts=(4, 2))])["tpot"].values == [1000.0]


def test_the_server_s_count_goes_before_the_events() -> None:
    # Three events; the server says seven tokens: six after the first.
    many = request(arrivals=(1.0, 2.0, 4.0), output_tokens=7)
    assert latencies_of([many])["tpot"].values == pytest.approx([500.0])
    unknown = request(arrivals=(1.0, 2.0, 4.0), output_tokens=3, counted_by="events")
    assert latencies_of([unknown])["tpot"].values == pytest.approx([1500.0])


@pytest.mark.parametrize(
    ("arrivals", "missing"),
    [((1.0,), {"itl", "tpot"}), ((), {"itl", "tpot", "ttft", "ttft_scheduled"})],
)
def test_missing_events_have_no_values(arrivals: tuple[float, ...], missing: set[str]) -> None:
    observed = latencies_of([request(arrivals=arrivals)])
    assert {name for name, (values, _) in observed.items() if not values.size} == missing


def test_warmups_and_failures_have_no_latency() -> None:
    records = [
        request(0, warmup=True, arrivals=(9.0,)),
        request(1, error="timeout"),
        request(2),
    ]
    assert [record.index for record in without_warmup(records)] == [1, 2]
    assert list(latencies_of(records)["ttft"].values) == [1000.0]


def test_batches_as_text_generation_benchmark_defines_them() -> None:
    runs = [
        BatchRecord(
            batch_size=4, sequence_length=10, decode_length=8, prefill=9.0, decodes=[9.0] * 7,
            warmup=True,
        ),
        BatchRecord(
            batch_size=4, sequence_length=10, decode_length=8, prefill=0.02,
            decodes=[0.01, 0.02, 0.01, 0.02, 0.01, 0.02, 0.015],
        ),
    ]  # fmt: skip
    values = {name: float(array[0]) for name, array in batch_values(runs).items()}
    assert values == pytest.approx(
        {
            "prefill": 20.0,
            "prefill_throughput": 4 * 10 / 0.02,
            "decode_total": 105.0,
            "decode_token": 15.0,
            "decode_throughput": 4 * 7 / 0.105,
        }
    )


def test_a_decode_length_of_one_decodes_nothing() -> None:
    run = BatchRecord(batch_size=1, sequence_length=10, decode_length=1, prefill=0.5, decodes=[])
    found = batch_values([run])
    assert list(found["prefill"]) == [500.0]
    assert not found["decode_token"].size
    assert not found["decode_throughput"].size


def test_rates_sum_up_to_the_totals() -> None:
    records = [
        request(0, arrivals=(1.0, 2.0), output_tokens=6),  # 6 tokens, whole at 2.5
        request(1, at=1.0, arrivals=(6.0, 8.0), counts=(1, 2)),  # 3 tokens, whole at 8.5
        request(2, error="http 500"),
        request(3, warmup=True),
    ]
    found = windows(records, duration=10.0, slices=10)
    assert list(found["requests_per_second"]) == [0, 0, 1, 0, 0, 0, 0, 0, 1, 0]
    assert list(found["output_tokens_per_second"]) == [0, 3, 3, 0, 0, 0, 1, 0, 2, 0]
    assert list(found["input_tokens_per_second"]) == [0, 10, 0, 0, 0, 0, 10, 0, 0, 0]
    assert found["total_tokens_per_second"].mean() == pytest.approx((6 + 3 + 20) / 10)


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.lists(st.floats(0.001, 2), min_size=1, max_size=20)),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 40),
)
def test_no_token_is_lost_in_the_slices(
    drawn: list[tuple[float, list[float]]], slices: int
) -> None:
    records: list[BenchRequestRecord] = []
    for index, (start, gaps) in enumerate(drawn):
        arrivals = tuple(float(time) for time in start + np.cumsum(gaps))
        records.append(request(index, at=start, arrivals=arrivals))
    first = min(record.scheduled for record in records)
    duration = max(record.finished for record in records) - first
    found = windows(records, duration, slices)
    tokens = sum(record.output_tokens for record in records)
    assert found["output_tokens_per_second"].mean() * duration == pytest.approx(tokens)
    assert found["requests_per_second"].mean() * duration == pytest.approx(len(records))


def test_a_request_is_good_if_it_meets_every_limit() -> None:
    # Tokens at 1, 2 and 4 s, whole at 4.5: TTFT 1000, TPOT 1500, longest gap 2000, E2E 4500.
    records = [request(), request(error="timeout"), request(arrivals=(1.0,)), request(arrivals=())]
    assert list(meets_slo(records, {"ttft": 1000})) == [True, False, True, False]
    assert list(meets_slo(records, {"tpot": 1499})) == [False, False, True, True]
    assert list(meets_slo(records, {"itl": 2000, "e2e": 4500})) == [True, False, True, True]
    assert list(meets_slo(records, {"itl": 1999})) == [False, False, True, True]


def test_limits_count_from_when_a_request_was_due() -> None:
    waited = request(late=0.9)
    assert latencies_of([waited])["ttft"].values == pytest.approx([100.0])
    assert not meets_slo([waited], {"ttft": 500})[0]


def test_limits_as_text() -> None:
    assert parse_slo("ttft:200, tpot:50.5") == {"ttft": 200.0, "tpot": 50.5}


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "speed:3",
                                  "ttft:1,ttft:2"])  # fmt: skip
def test_limits_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"limited|not|no limit"):
        parse_slo(text)
