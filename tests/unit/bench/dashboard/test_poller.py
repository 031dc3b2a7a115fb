import httpx

from tgi_cli.bench.dashboard.poller import ServerPoller, read

TGI = """\
# HELP tgi_queue_size Requests that wait in the engine.
# TYPE tgi_queue_size gauge
tgi_queue_size {queue}
tgi_batch_current_size 3
tgi_kv_cache_usage_ratio 0.25
tgi_prefix_cache_query_tokens_total {looked_up}
tgi_prefix_cache_hit_tokens_total {hits}
tgi_request_time_to_first_token_seconds_count {first}
tgi_request_inter_token_seconds_count {later}
tgi_engine_prompt_tokens_total{{}} 0
tgi_batch_inference_count{{method="prefill"}} 4
"""


class Server:
    """Answers with one text after the other; None is no answer."""

    def __init__(self, *answers: str | int | None) -> None:
        self.answers = list(answers)
        self.now = 100.0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/metrics"
        answer = self.answers.pop(0)
        if answer is None:
            raise httpx.ConnectError("connection refused")
        if isinstance(answer, int):
            return httpx.Response(answer)
        return httpx.Response(200, text=answer)

    def clock(self) -> float:
        self.now += 2.0
        return self.now


def poller(server: Server, url: str = "http://server:3000") -> ServerPoller:
    return ServerPoller(url, transport=httpx.MockTransport(server), clock=server.clock)


async def test_rates_are_of_the_time_between_two_answers() -> None:
    server = Server(
        TGI.format(queue=0, looked_up=100, hits=0, first=10, later=90),
        TGI.format(queue=7, looked_up=300, hits=150, first=20, later=180),
    )
    asked = poller(server, "http://server:3000/v1")
    await asked.ask()
    await asked.ask()
    first, second = asked.history.samples
    assert (first.queued, first.output, first.hits) == (0, None, None)
    assert (second.queued, second.running, second.kv) == (7, 3, 0.25)
    assert (second.output, second.hits, second.input) == (50.0, 0.75, 0.0)
    await asked.close()


async def test_a_server_that_goes_and_comes_back() -> None:
    metrics = TGI.format(queue=0, looked_up=0, hits=0, first=1000, later=1000)
    again = TGI.format(queue=0, looked_up=0, hits=0, first=4, later=0)
    server = Server(metrics, None, 503, again, again)
    asked = poller(server)
    await asked.ask()
    await asked.ask()
    assert asked.history.error == "connection refused"
    await asked.ask()
    assert asked.history.error == "HTTP 503"
    await asked.ask()
    assert asked.history.error == ""
    assert asked.history.samples[-1].output is None  # nothing to compare with yet
    await asked.ask()
    assert asked.history.samples[-1].output == 0.0
    assert asked.history.version == 5


async def test_a_counter_that_shrank_began_again() -> None:
    before = TGI.format(queue=0, looked_up=0, hits=0, first=1000, later=1000)
    server = Server(before, TGI.format(queue=0, looked_up=0, hits=0, first=4, later=6))
    asked = poller(server)
    await asked.ask()
    await asked.ask()
    assert asked.history.samples[-1].output == 5.0


async def test_a_server_without_known_metrics_is_an_error() -> None:
    asked = poller(Server("process_cpu_seconds_total 3\nnot a line\n", "<html>no</html>"))
    for _ in range(2):
        await asked.ask()
        assert "no metrics" in asked.history.error


async def test_an_invalid_address_is_an_error() -> None:
    asked = ServerPoller("nonsense")
    await asked.ask()
    assert asked.history.error
    await asked.close()


def test_names_of_vllm_and_of_older_tgi() -> None:
    vllm = read(
        'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_waiting{engine="1",model_name="m"} 3.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        'vllm:generation_tokens_total{engine="0"} 1e3\n',
        0.0,
    ).values
    assert (vllm["queued"], vllm["kv"], vllm["output"]) == (5.0, 0.5, 1000.0)
    assert vllm["running"] is None
    older = read("tgi_queue_size 1\ntgi_request_generated_tokens_sum 77\n", 0.0).values
    assert (older["queued"], older["output"], older["kv"]) == (1.0, 77.0, None)


async def test_accepted_drafts_are_a_share_of_those_since_the_last_answer() -> None:
    drafts = "tgi_draft_tokens_total {}\ntgi_draft_accepted_tokens_total {}\n"
    server = Server(*(drafts.format(*each) for each in ((10, 10), (30, 15), (30, 15))), "tgi_x 1\n")
    asked = poller(server)
    for _ in range(4):
        await asked.ask()
    assert [sample.accepted for sample in asked.history.samples] == [None, 0.25, None, None]
    await asked.close()


async def test_accepted_drafts_are_told_apart_by_their_source() -> None:
    drafts = (
        'tgi_draft_tokens_by_source_total{{source="context"}} {}\n'
        'tgi_draft_accepted_tokens_by_source_total{{source="context"}} {}\n'
        'tgi_draft_tokens_by_source_total{{source="weights"}} {}\n'
        'tgi_draft_accepted_tokens_by_source_total{{source="weights"}} {}\n'
        'tgi_draft_tokens_by_source_total{{source="grammar"}} 0\n'
    )
    counted = ((10, 10, 0, 0), (30, 15, 4, 3), (30, 15, 8, 7), (1, 1, 0, 0))
    server = Server(*(drafts.format(*each) for each in counted))
    asked = poller(server)
    for _ in counted:
        await asked.ask()
    assert [sample.accepted_by_source for sample in asked.history.samples] == [
        {},
        {"context": 0.25, "weights": 0.75},
        {"weights": 1.0},
        {"context": 1.0},  # of a server that was restarted
    ]
    await asked.close()
