"""The panels of the dashboard: what each shows, from which queries.

TGI's dashboard has what is under Requests, Queue and batch, and Engine; the rest is new.
"""

from __future__ import annotations

from tgi_cli.deploy.monitoring.engine_panels import (
    CACHE_PANELS,
    ENGINE_PANELS,
    REPLICA_PANELS,
    SPECULATION_PANELS,
)
from tgi_cli.deploy.monitoring.panel import COUNT, REQUESTS, SECONDS, SHARE, TOKENS, Panel, PanelRow
from tgi_cli.deploy.monitoring.queries import (
    increase,
    mean,
    quantile,
    quantiles,
    rate,
    series,
    total,
)

FIRST_TOKEN = "tgi_request_time_to_first_token_seconds"
INTER_TOKEN = "tgi_request_inter_token_seconds"
SERVER_FAILURES = "generation|incomplete|timeout"
"""Labels ``err`` of failures that are not the client's."""


def _stat(
    title: str,
    unit: str,
    query: str,
    description: str = "",
    thresholds: tuple[float, float] | None = None,
    top: float | None = None,
) -> Panel:
    return Panel(
        title=title,
        unit=unit,
        queries={title: query},
        kind="stat",
        width=3,
        thresholds=thresholds,
        top=top,
        description=description,
    )


_FAILED = rate("tgi_request_failure", err=SERVER_FAILURES)

OVERVIEW = PanelRow(
    "Overview",
    (
        _stat("Requests", REQUESTS, rate("tgi_request_count")),
        _stat("Generated tokens", TOKENS, rate("tgi_request_generated_tokens_sum")),
        _stat(
            "Time to first token, p90",
            SECONDS,
            quantile(0.9, FIRST_TOKEN),
            "From the arrival of a request; the queue included.",
            thresholds=(2, 10),
        ),
        _stat(
            "Time between tokens, p90",
            SECONDS,
            quantile(0.9, INTER_TOKEN),
            thresholds=(0.1, 0.5),
        ),
        _stat(
            "Failed requests",
            SHARE,
            f"{_FAILED} / {rate('tgi_request_count')}",
            "Those that failed in the engine, were cut off or missed their deadline.",
            thresholds=(0.001, 0.05),
        ),
        _stat("Waiting requests", COUNT, total("tgi_queue_size"), thresholds=(8, 64)),
        _stat(
            "KV cache in use",
            SHARE,
            f"max({series('tgi_kv_cache_usage_ratio')})",
            "Of the fullest engine. Blocks that only prefixes hold are free.",
            thresholds=(0.9, 0.99),
            top=1,
        ),
        _stat(
            "Engines",
            COUNT,
            f"{total('tgi_replica_up')} or count({series('tgi_request_count')})",
            "Replicas that get requests; of servers without replicas, those that answer.",
        ),
    ),
)

REQUEST_PANELS = PanelRow(
    "Requests",
    (
        Panel(
            title="Requests",
            unit=REQUESTS,
            queries={
                "received": rate("tgi_request_count"),
                "completed": rate("tgi_request_success"),
                "failed": rate("tgi_request_failure"),
            },
            description="Each prompt, and each further sample of it, counts as one request.",
        ),
        Panel(
            title="Failures by cause",
            unit=REQUESTS,
            queries={"{{err}}": rate("tgi_request_failure", "err")},
            stacked=True,
            description="validation and template: errors of clients. overloaded: refused with 429. "
            "dropped: the client went away. timeout: its deadline passed.",
        ),
        Panel(
            title="In flight",
            unit=COUNT,
            queries={"{{instance}}": total("tgi_request_in_flight", "instance")},
        ),
        Panel(
            title="Time to first token",
            unit=SECONDS,
            queries=quantiles(FIRST_TOKEN),
            thresholds=(2, 10),
        ),
        Panel(
            title="Time between tokens",
            unit=SECONDS,
            queries=quantiles(INTER_TOKEN),
            thresholds=(0.1, 0.5),
        ),
        Panel(
            title="Time per token",
            unit=SECONDS,
            queries=quantiles("tgi_request_mean_time_per_token_duration"),
            description="Of a request: its time in the engine by its number of tokens.",
        ),
        Panel(title="Duration", unit=SECONDS, queries=quantiles("tgi_request_duration")),
        Panel(
            title="Where the time goes (mean)",
            unit=SECONDS,
            queries={
                "validation": mean("tgi_request_validation_duration"),
                "queue": mean("tgi_request_queue_duration"),
                "inference": mean("tgi_request_inference_duration"),
            },
            stacked=True,
        ),
        Panel(
            title="Time to first token, distribution",
            unit=SECONDS,
            queries={"{{le}}": increase(f"{FIRST_TOKEN}_bucket", "le")},
            kind="heatmap",
        ),
        Panel(title="Prompt tokens", unit=COUNT, queries=quantiles("tgi_request_input_length")),
        Panel(
            title="Generated tokens", unit=COUNT, queries=quantiles("tgi_request_generated_tokens")
        ),
        Panel(
            title="Limit of generated tokens",
            unit=COUNT,
            queries=quantiles("tgi_request_max_new_tokens"),
        ),
    ),
)

BATCH_PANELS = PanelRow(
    "Queue and batch",
    (
        Panel(
            title="Queue",
            unit=COUNT,
            queries={"{{instance}}": total("tgi_queue_size", "instance")},
            description="Requests that wait to join the batch. Autoscalers read it.",
        ),
        Panel(
            title="Oldest waiting request",
            unit=SECONDS,
            queries={"{{instance}}": f"max by (instance) ({series('tgi_queue_age_seconds')})"},
            thresholds=(5, 30),
        ),
        Panel(
            title="Time in the queue",
            unit=SECONDS,
            queries=quantiles("tgi_request_queue_duration"),
        ),
        Panel(
            title="Running requests",
            unit=COUNT,
            queries={"{{instance}}": total("tgi_batch_current_size", "instance")},
        ),
        Panel(
            title="Requests that join at once",
            unit=COUNT,
            queries=quantiles("tgi_batch_next_size"),
        ),
        Panel(
            title="Joins to a running batch",
            unit=REQUESTS,
            queries={"{{reason}}": rate("tgi_batch_concat", "reason")},
            stacked=True,
        ),
    ),
)

ROWS = (
    OVERVIEW,
    REQUEST_PANELS,
    BATCH_PANELS,
    ENGINE_PANELS,
    CACHE_PANELS,
    SPECULATION_PANELS,
    REPLICA_PANELS,
)
