"""The router's own cost of several replicas, in microseconds of CPU.

``python -m tests.benchmarks.replica_routing`` prints for prompts of several lengths what choosing a
replica costs, new and with its prefix known; and what a token costs on its way through the client's
streams, with and without a pool: it is the same path.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

from tests.router.replicas.conftest import pool_of
from tests.router.replicas.test_pool import StreamingReplica
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.router.replicas.pool import EnginePool
from tgi_cli.sampling.params import SamplingParams

LENGTHS = (32, 512, 4096, 32_768, 131_072)
REPLICAS = (2, 8)
STREAMS = 64
STEPS = 200


def submit_us(
    engine: EnginePool | StreamingReplica, requests: Sequence[GenerationRequest]
) -> float:
    """Microseconds of CPU of submitting one of these requests."""
    began = time.process_time()
    for each in requests:
        engine.submit(each)
    return (time.process_time() - began) / len(requests) * 1e6


def request(number: int, length: int) -> GenerationRequest:
    ids = tuple(random.Random(number).choices(range(150_000), k=length))
    return GenerationRequest(
        request_id=number, prompt_ids=ids, sampling=SamplingParams(), max_new_tokens=9
    )


def routing() -> None:
    print(f"{'prompt tokens':>14}{'replicas':>10}{'new, us':>10}{'known, us':>11}")
    for length in LENGTHS:
        requests = [request(number, length) for number in range(max(5, 20_000 // length))]
        for count in REPLICAS:
            replicas = [StreamingReplica() for _ in range(count)]
            for replica in replicas:
                replica.info = replace(replica.info, max_batch_total_tokens=1 << 24)
            pool = pool_of(replicas, balance_abs_threshold=1 << 20)
            first, again = submit_us(pool, requests), submit_us(pool, requests)
            print(f"{length:14,}{count:10}{first:10.1f}{again:11.1f}")


def tokens() -> None:
    requests = [request(number, 64) for number in range(STREAMS)]
    outputs = {
        "request_ids": [*range(STREAMS)],
        "token_ids": [1] * STREAMS,
        "logprobs": [0.0] * STREAMS,
        "top_ids": [[]] * STREAMS,
        "top_logprobs": [[]] * STREAMS,
    }
    for pooled in (False, True):
        replica = StreamingReplica()
        submit_us(pool_of([replica]) if pooled else replica, requests)
        began = time.process_time()
        for _ in range(STEPS):
            replica.deliver(**outputs)
        cost = (time.process_time() - began) / (STEPS * STREAMS) * 1e6
        print(f"a token, {'pool' if pooled else 'one engine'}: {cost:.2f} us")


if __name__ == "__main__":
    routing()
    tokens()
