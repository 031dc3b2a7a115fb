"""The metrics of a server of several models: its own, and those of the models by label."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tgi_cli.engine.metrics import SECONDS
from tgi_cli.multi_model.model_scheduler import LoadState, ModelScheduler
from tgi_cli.router.observability.prometheus import CounterMetric, HistogramMetric

_RESULTS = ("success", "failure")


class FrontMetrics:
    """What is counted over the server's life.

    Attributes:
        unloads: by model.
        refusals: requests that could not wait for their model.
        waits: seconds from a request's arrival to its forwarding.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self._loads = {(model, result): 0 for model in models for result in _RESULTS}
        self.unloads = dict.fromkeys(models, 0)
        self.refusals = CounterMetric(
            "tgi_model_refused_requests_total", "Requests that could not wait for their model."
        )
        self.waits = HistogramMetric(
            "tgi_model_wait_seconds", "Seconds that a request waited for its model.", SECONDS
        )

    def count_load(self, model: str, result: str) -> None:
        """Count a load that ended in ``success`` or ``failure``."""
        self._loads[model, result] += 1

    def lines(self, scheduler: ModelScheduler) -> Iterator[str]:
        """The exposition."""
        models = scheduler.models
        yield from _family(
            "tgi_model_loads_total",
            "counter",
            "Loads of a model.",
            {f'model="{_label(m)}",result="{r}"': n for (m, r), n in self._loads.items()},
        )
        for name, kind, help, values in (
            ("tgi_model_unloads_total", "counter", "Unloads of a model.", self.unloads),
            (
                "tgi_model_loaded",
                "gauge",
                "Whether a model serves.",
                {m.name: int(m.state is LoadState.LOADED) for m in models.values()},
            ),
            (
                "tgi_model_memory_bytes",
                "gauge",
                "Memory of a loaded model: its peak, or an estimate before it was loaded.",
                {m.name: m.memory for m in models.values()},
            ),
            (
                "tgi_model_load_seconds",
                "gauge",
                "Time of a model's last load.",
                {m.name: m.load_seconds or 0.0 for m in models.values()},
            ),
            (
                "tgi_model_running_requests",
                "gauge",
                "Requests that were forwarded to a model and have not ended.",
                {m.name: m.running for m in models.values()},
            ),
            (
                "tgi_model_waiting_requests",
                "gauge",
                "Requests that wait for a model to be loaded.",
                {name: scheduler.queued_for(name) for name in models},
            ),
        ):
            labelled = {f'model="{_label(model)}"': value for model, value in values.items()}
            yield from _family(name, kind, help, labelled)
        for name, kind, help, value in (
            (
                "tgi_model_switches_total",
                "counter",
                "Models unloaded to load another one.",
                scheduler.switches,
            ),
            (
                "tgi_model_memory_budget_bytes",
                "gauge",
                "Memory that all loaded models may take.",
                scheduler.policy.budget,
            ),
        ):
            yield from _family(name, kind, help, {"": value})
        yield from self.refusals.lines()
        yield from self.waits.lines()


def _family(name: str, kind: str, help: str, values: Mapping[str, float]) -> Iterable[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values.items():
        yield f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
