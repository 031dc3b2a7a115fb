"""Frames, client lag, metrics, the machine, tokenizers of this machine."""

from __future__ import annotations

import io

import msgspec
import pytest

from tgi_cli import demo
from tgi_cli.bench.events import BenchRequest, BenchRequestRecord, ClientHealth
from tgi_cli.bench.load import client_lag, frames
from tgi_cli.bench.load.frames import (
    GeneratorEnded,
    IndexedRequest,
    RequestChunk,
    RunNote,
    pack,
)
from tgi_cli.bench.load.generator import batch_record
from tgi_cli.bench.metrics_scrape import parse_metrics
from tgi_cli.bench.token_counter import LocalTokenCounter, TokenEstimator
from tgi_cli.process import machine
from tgi_cli.process.framing import FrameDecoder


def test_frames_survive_any_pieces() -> None:
    messages: list[frames.FromGenerator] = [
        RunNote("one"),
        GeneratorEnded(ClientHealth(cpu=0.5), "two"),
        RunNote("x" * 70_000),
    ]
    data = b"".join(pack(message) for message in messages)
    for size in (1, 3, 4096, len(data)):
        decoder = FrameDecoder()
        found = [
            frames.decode(frame)
            for begin in range(0, len(data), size)
            for frame in decoder.feed(data[begin : begin + size])
        ]
        assert found == messages


def test_an_invalid_frame_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        frames.decode(b"\xc1\xc1")


def test_generators_read_frames_until_the_pipe_ends() -> None:
    request = BenchRequest(prompt="x", prompt_tokens=1, max_tokens=2, at=0.5, conversation=0)
    sent = RequestChunk([IndexedRequest(4, request)])
    stream = io.BytesIO(pack(sent) + pack(sent)[:-1])
    assert frames.read(stream) == sent
    assert frames.read(stream) is None


@pytest.mark.parametrize(
    ("metrics", "behind"),
    [
        ((0.001, 0.2, 0.001, 60.0), ""),
        ((0.2, 0.2, 0.001, 60.0), "lagged 200 ms"),
        ((0.001, 0.97, 0.001, 60.0), "97% of a core"),
        ((0.001, 0.97, 0.001, 0.2), ""),
        ((0.001, 0.2, 0.3, 60.0), "300 ms after they were due"),
    ],
)
def test_a_client_that_falls_behind_is_reported(
    metrics: tuple[float, float, float, float], behind: str
) -> None:
    client = client_lag.assess(*metrics)
    assert client.behind == bool(behind)
    assert behind in client.reason


def test_of_several_clients_the_worst_counts() -> None:
    slow = ClientHealth(lag_p99=0.3, cpu=0.1, behind=True, reason="slow")
    whole = client_lag.worst_of([ClientHealth(cpu=0.7, late_p99=0.01), slow])
    assert whole == ClientHealth(lag_p99=0.3, cpu=0.7, late_p99=0.01, behind=True, reason="slow")
    assert client_lag.worst_of([]) == ClientHealth()


def test_percentiles_are_by_the_nearest_rank() -> None:
    assert client_lag.percentile(list(range(1000)), 0.99) == 990
    assert client_lag.percentile([3.0], 0.99) == 3.0
    assert client_lag.percentile([], 0.99) == 0.0


METRICS = """\
# TYPE tgi_request_count counter
tgi_request_count 5
# TYPE tgi_queue_size gauge
tgi_queue_size 3
# TYPE tgi_batch_inference_count counter
tgi_batch_inference_count{method="prefill"} 2
tgi_batch_inference_count{method="decode"} 7
# TYPE tgi_request_duration histogram
tgi_request_duration_bucket{le="1"} 4
tgi_request_duration_bucket{le="+Inf"} 5
tgi_request_duration_sum 6.5
tgi_request_duration_count 5
# TYPE process_open_fds gauge
process_open_fds 12
"""

VLLM = """\
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 4
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{model_name="m"} 9
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 8
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 6
"""


def test_where_drafts_come_from_is_kept_apart() -> None:
    reading = parse_metrics(
        "# TYPE tgi_draft_tokens_by_source_total counter\n"
        'tgi_draft_tokens_by_source_total{source="context"} 4\n'
        'tgi_draft_tokens_by_source_total{source="weights"} 2\n'
    )
    name = "tgi_draft_tokens_by_source_total"
    assert reading.values == {f"{name}{{source=context}}": 4, f"{name}{{source=weights}}": 2}


def test_metrics_are_summed_by_tgis_names() -> None:
    reading = parse_metrics(METRICS)
    assert reading.values == {
        "tgi_request_count": 5,
        "tgi_queue_size": 3,
        "tgi_batch_inference_count": 9,
        "tgi_request_duration_sum": 6.5,
        "tgi_request_duration_count": 5,
    }
    assert reading.gauges == {"tgi_queue_size"}
    theirs = parse_metrics(VLLM)
    assert theirs.values == {
        "tgi_queue_size": 4,
        "tgi_prefix_cache_hit_tokens_total": 9,
        "tgi_draft_tokens_total": 8,
        "tgi_draft_accepted_tokens_total": 6,
    }
    assert parse_metrics(METRICS + VLLM).values["tgi_queue_size"] == 3  # not both


def test_the_machine_is_described() -> None:
    found = machine.describe()
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 1 << 28
    assert isinstance(found["gpus"], list)
    assert "tokenizers" in found["packages"]
    assert msgspec.json.decode(msgspec.json.encode(found)) == found


def test_words_of_a_vocabulary_are_one_token_each() -> None:
    tokens = LocalTokenCounter.load(demo.model_path(), demo.MODEL_ID)
    words = tokens.words()
    assert len(words) >= 64
    text = " ".join(list(words)[:50])
    assert tokens.count(text, special=False) == 50
    assert tokens.count(text) - 50 == tokens.count("")


def test_guesses_are_near_for_common_words() -> None:
    guess = TokenEstimator()
    assert guess.count(" ".join(list(guess.words())[:40])) == 40
    assert guess.count("") == 0
    assert guess.count("unbelievable, really!") == 5


def request_record(arrivals: list[float], tokens: int, finished: float) -> BenchRequestRecord:
    return BenchRequestRecord(
        index=0,
        scheduled=0.0,
        dispatched=0.0,
        arrivals=arrivals,
        counts=[1] * len(arrivals),
        finished=finished,
        input_tokens=5,
        output_tokens=tokens,
    )


def test_a_batch_over_http_lasts_until_its_last_first_token() -> None:
    fast = request_record([1.0, 2.0, 3.0], 3, 3.0)
    slow = request_record([1.5, 3.5, 5.5], 3, 5.5)
    whole = batch_record([fast, slow], warmup=False)
    assert (whole.prefill, whole.decodes, whole.decode_length) == (1.5, [1.5, 1.5], 3)
    # Of five tokens the stream showed two: the others have the mean of the time that there was.
    sparse = request_record([1.0, 2.0], 5, 5.0)
    assert batch_record([sparse], warmup=True).decodes == [1.0] * 4
