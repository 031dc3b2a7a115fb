"""Alert rules: https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules/

They concern what users notice (no answers, errors, long waits) and what leads to it soon. Series
of one server differ from another's in ``job`` and ``instance``, those of its engines in
``replica``.
"""

from __future__ import annotations

from typing import Any

import yaml


def _share_of_failures(causes: str) -> str:
    """The condition that more than one of twenty requests fails for these causes."""
    failures = f'sum by (job, instance) (rate(tgi_request_failure{{err=~"{causes}"}}[5m]))'
    return f"{failures} > 0.05 * sum by (job, instance) (rate(tgi_request_count[5m]))"


_RULES = (
    (
        "TGIAbsent",
        "absent(tgi_request_count)",
        "5m",
        "critical",
        "No server is scraped",
        "Prometheus has no metrics of any server: the servers are down, or not among its targets.",
    ),
    (
        "TGIEngineStalled",
        "tgi_batch_current_size > 0 and rate(tgi_engine_steps_total[2m]) == 0",
        "2m",
        "critical",
        "The engine makes no progress",
        "{{ $value }} requests are running on {{ $labels.instance }}, and no step was completed "
        "for two minutes.",
    ),
    (
        "TGIReplicaDown",
        "tgi_replica_up == 0 unless on (job, instance) tgi_engine_asleep == 1",
        "10m",  # longer than a large model takes to load in a rolling restart
        "warning",
        "A replica serves nothing",
        "Replica {{ $labels.replica }} of {{ $labels.instance }} gets no requests; the others get "
        "its share.",
    ),
    (
        "TGIModelServerRestarts",
        "resets(tgi_engine_steps_total[30m]) > 2 unless on (job, instance) "
        "sum by (job, instance) (increase(tgi_engine_wakes_total[30m])) > 0",
        "0m",
        "warning",
        "The model server restarts again and again",
        "The model server of {{ $labels.instance }} was started anew {{ $value }} times in half "
        "an hour; its log has the cause.",
    ),
    (
        "TGIWakeFails",
        'increase(tgi_engine_wakes_total{result="failure"}[15m]) > 0',
        "0m",
        "critical",
        "A model server does not wake",
        "{{ $labels.instance }} could not start its sleeping model server.",
    ),
    (
        "TGIRequestsFail",
        f"{_share_of_failures('generation|incomplete')} and sum by (job, instance) "
        '(increase(tgi_request_failure{err=~"generation|incomplete"}[5m])) > 5',
        "5m",
        "critical",
        "Requests fail",
        "More than 5 % of the requests to {{ $labels.instance }} fail in the engine.",
    ),
    (
        "TGIDeadlinesMissed",
        _share_of_failures("timeout"),
        "10m",
        "warning",
        "Requests miss their deadlines",
        "More than 5 % of the requests to {{ $labels.instance }} are not done within the time that "
        "their clients set.",
    ),
    (
        "TGIRequestsRefused",
        'rate(tgi_request_failure{err="overloaded"}[5m]) > 0',
        "5m",
        "warning",
        "Requests are refused",
        "{{ $labels.instance }} is overloaded and refuses {{ $value | humanize }} requests per "
        "second: it needs more pods, or clients that wait.",
    ),
    (
        "TGIQueueWaits",
        "tgi_queue_age_seconds > 30",
        "5m",
        "warning",
        "Requests wait long",
        "The oldest request in the queue of {{ $labels.instance }} has waited for "
        "{{ $value | humanizeDuration }}.",
    ),
    (
        "TGIFirstTokenSlow",
        "histogram_quantile(0.9, sum by (job, instance, le) "
        "(rate(tgi_request_time_to_first_token_seconds_bucket[5m]))) > 10",
        "10m",
        "warning",
        "First tokens are late",
        "One of ten requests to {{ $labels.instance }} waits more than "
        "{{ $value | humanizeDuration }} for its first token.",
    ),
    (
        "TGIPreemptions",
        "rate(tgi_preemptions_total[5m]) > 0.1",
        "10m",
        "warning",
        "The KV cache is too small",
        "{{ $labels.instance }} takes the blocks of {{ $value | humanize }} requests per second "
        "for others, and computes them again later. Fewer requests at once or shorter ones, or "
        "more memory for the cache, avoid it.",
    ),
)
"""Name, condition, time that it holds before the alert, severity, summary, description."""


def alert_rules() -> dict[str, Any]:
    """The document of a rule file, which is also the spec of a PrometheusRule."""
    rules = [
        {
            "alert": name,
            "expr": condition,
            "for": duration,
            "labels": {"severity": severity},
            "annotations": {"summary": summary, "description": description},
        }
        for name, condition, duration, severity, summary, description in _RULES
    ]
    return {"groups": [{"name": "tgi", "rules": rules}]}


def render_alerts() -> str:
    """A rule file."""
    text: str = yaml.safe_dump(alert_rules(), sort_keys=False, width=100)
    return text
