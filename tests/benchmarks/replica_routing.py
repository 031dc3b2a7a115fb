"""The router's own cost of several replicas, in microseconds of CPU.

``python -m tests.benchmarks.replica_routing`` prints for prompts of several lengths what choosing a
replica costs, new and with its prefix known; and what a token costs on its way through the client's
streams, with and without a pool: it is the same path.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tests.router.replicas.conftest import pool_of
from tests.router.replicas.test_pool import StreamingReplica
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.sampling.params import SamplingParams

LENGTHS = (32, 512, 4096, 32_768, 131_072)
REPLICAS = (2, 8)
STREAMS = 64
STEPS = 200


def cpu_us(work: Callable[[], object], times: int) -> float:
    """Microseconds of CPU of one call."""
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times * 1e6


def request(number: int, length: int) -> GenerationRequest:
    ids = tuple(random.Random(number).choices(range(150_000), k=length))
    return GenerationRequest(
        request_id=number, prompt_ids=ids, sampling=SamplingParams(), max_new_tokens=9
    )


def routing() -> None:
    print(f"{'prompt tokens':>14}{'replicas':>10}{'new, us':>10}{'known, us':>11}")
    for length in LENGTHS:
        times = max(5, 20_000 // length)
        requests = [request(number, length) for number in range(times)]
        for count in REPLICAS:
            pool = pool_of([StreamingReplica() for _ in range(count)])
            for replica in range(count):
                pool._policy.reset(replica, 10_000_000)
            new, known = iter(requests), iter(requests)
            first = cpu_us(lambda: pool._choose(next(new), ""), times)
            again = cpu_us(lambda: pool._choose(next(known), ""), times)
            print(f"{length:14,}{count:10}{first:10.1f}{again:11.1f}")


def tokens() -> None:
    for pooled in (False, True):
        replica = StreamingReplica()
        submit = pool_of([replica]).submit if pooled else replica.submit
        for number in range(STREAMS):
            submit(request(number, 64))
        step = {
            "request_ids": [*range(STREAMS)],
            "token_ids": [1] * STREAMS,
            "logprobs": [0.0] * STREAMS,
            "top_ids": [[]] * STREAMS,
            "top_logprobs": [[]] * STREAMS,
        }
        cost = cpu_us(lambda step=step: replica.deliver(**step), STEPS) / STREAMS
        print(f"a token, {'pool' if pooled else 'one engine'}: {cost:.2f} us")


if __name__ == "__main__":
    routing()
    tokens()
