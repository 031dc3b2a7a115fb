"""Markdown and HTML: what they say, and that they parse."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest

from tests.unit.bench.results.simulation import Server, request, saved
from tgi_cli.bench import plan
from tgi_cli.bench.compare import compare
from tgi_cli.bench.events import (
    BatchRecord,
    BenchRun,
    BenchStep,
    BenchTarget,
    ClientHealth,
    StepRecord,
)
from tgi_cli.bench.plan import StepBounds
from tgi_cli.bench.reports import comparison, html, markdown, tgi_tables
from tgi_cli.bench.reports.charts import (
    AxisScale,
    ChartLine,
    ChartPoint,
    LineChart,
    format_tick,
)
from tgi_cli.bench.reports.markdown import table

BOUNDS = StepBounds(seconds=20)


def batches() -> BenchRun:
    steps = []
    for size in (1, 32):
        runs = [
            BatchRecord(
                batch_size=size,
                sequence_length=10,
                decode_length=8,
                prefill=prefill * size / 1000,
                decodes=[0.005] * 7,
                warmup=prefill == 99,
            )
            for prefill in (99, 10, 10, 16)
        ]
        step = BenchStep(kind="batch", value=size, label=str(size), warmup=1, requests=4)
        steps.append(StepRecord(step=step, began=0, duration=1, batches=runs))
    workload = {
        "load": "batch",
        "tokenizer_name": "bigscience/bloom-560m",
        "sequence_length": 10,
        "decode_length": 8,
        "runs": 3,
        "warmups": 1,
        "temperature": 0.5,
        "do_sample": True,
    }
    return saved(steps, workload=workload)


def loads() -> BenchRun:
    server = Server()
    steps = [server.answer(plan.client_step(count, BOUNDS)) for count in (1, 4, 16)]
    broken = msgspec.structs.replace(
        steps[2],
        requests=[*steps[2].requests, request(999, error="http 500", detail="<b>boom</b> | & so")],
        client=ClientHealth(behind=True, reason="its core was busy"),
    )
    target = BenchTarget(
        kind="tgi", address="http://h:1", model="m/<script>x</script>", info={"a": 1}
    )
    return saved([*steps[:2], broken], target=target, slo={"ttft": 100.0}, notes=["a note"])


TABLES = """\
| Parameter          | Value                 |
|--------------------|-----------------------|
| Model              | bigscience/bloom-560m |
| Sequence Length    | 10                    |
| Decode Length      | 8                     |
| Top N Tokens       | None                  |
| N Runs             | 3                     |
| Warmups            | 1                     |
| Temperature        | Some(0.5)             |
| Top K              | None                  |
| Top P              | None                  |
| Typical P          | None                  |
| Repetition Penalty | None                  |
| Frequency Penalty  | None                  |
| Watermark          | false                 |
| Do Sample          | true                  |

| Step           | Batch Size | Average   | Lowest    | Highest   | p50       | p90       | p99       |
|----------------|------------|-----------|-----------|-----------|-----------|-----------|-----------|
| Prefill        | 1          | 12.00 ms  | 10.00 ms  | 16.00 ms  | 10.00 ms  | 14.80 ms  | 15.88 ms  |
|                | 32         | 384.00 ms | 320.00 ms | 512.00 ms | 320.00 ms | 473.60 ms | 508.16 ms |
| Decode (token) | 1          | 5.00 ms   | 5.00 ms   | 5.00 ms   | 5.00 ms   | 5.00 ms   | 5.00 ms   |
|                | 32         |           |           |           |           |           |           |
| Decode (total) | 1          | 35.00 ms  | 35.00 ms  | 35.00 ms  | 35.00 ms  | 35.00 ms  | 35.00 ms  |
|                | 32         |           |           |           |           |           |           |

| Step    | Batch Size | Average             | Lowest              | Highest             |
|---------|------------|---------------------|---------------------|---------------------|
| Prefill | 1          | 875.00 tokens/secs  | 625.00 tokens/secs  | 1000.00 tokens/secs |
|         | 32         |                     |                     |                     |
| Decode  | 1          | 200.00 tokens/secs  | 200.00 tokens/secs  | 200.00 tokens/secs  |
|         | 32         | 6400.00 tokens/secs | 6400.00 tokens/secs | 6400.00 tokens/secs |"""  # noqa: E501


def test_the_three_tables_of_text_generation_benchmark() -> None:
    assert tgi_tables(batches()) == TABLES
    assert markdown(batches()).startswith(TABLES)


def test_equal_neighbours_of_a_column_become_blank() -> None:
    made = table(["a", "b"], [["1", "x"], ["1", "y"], ["2", "y"], ["2", "y"]], merge=True)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in made.splitlines()[2:]]
    assert cells == [["1", "x"], ["", "y"], ["2", ""], ["", ""]]


def test_a_load_as_markdown() -> None:
    text = markdown(loads())
    lines = text.splitlines()
    assert lines[0].split("|")[1].strip() == "Load"
    assert "Goodput/s" in lines[0]
    assert lines[4].split("|")[3].strip() == "1 http 500"
    assert "| 4 clients  | ITL" in text
    assert re.search(r"\| \d+\.\d \(\d+\.\d to \d+\.\d\) \|", text)
    assert "- a note" in lines
    assert "- 16 clients: its core was busy" in lines


def test_a_run_without_steps_is_reported() -> None:
    assert markdown(saved([])) == "no step of the run has any metrics\n"
    assert "</html>" in html(saved([]))


class Page(HTMLParser):
    """Collects what a page has, and that its tags close."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("run", [batches(), loads()], ids=["batches", "loads"])
def test_the_page_is_valid_and_self_contained(run: BenchRun) -> None:
    text = html(run)
    page = Page(text)
    assert page.open == []
    assert page.references == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme:dark" in text
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(charts) >= 4
    for chart in charts:
        ElementTree.fromstring(chart)
        assert "nan" not in chart
        assert "inf" not in chart.replace("information", "")


def test_the_page_has_figures_errors_and_the_machine() -> None:
    text = html(loads())
    assert "<script>" not in text
    assert "&lt;b&gt;boom&lt;/b&gt; | &amp; so" in text
    for said in ("a processor", "http://h:1", "Percentiles", "Goodput", "4 (knee)", "p99.9"):
        assert said in text, said
    assert text.count("<details") == 3, "a timeline of each step"
    assert 'class="failed"' in text


def test_drafts_are_reported_by_their_source() -> None:
    run = loads()
    verified, accepted = (
        f"tgi_draft_{kind}_by_source_total" for kind in ("tokens", "accepted_tokens")
    )
    assert "Drafts from" not in markdown(run)
    assert "Speculative decoding" not in html(run)
    server = {f"{verified}{{source=context}}": 40.0, f"{accepted}{{source=context}}": 30.0}
    server[f"{verified}{{source=recent}}"] = 8.0
    run.steps[1] = msgspec.structs.replace(run.steps[1], server=server)
    text = markdown(run)
    assert "| Load      | Drafts from | Verified | Accepted | Share |" in text
    assert "| 4 clients | context     | 40       | 30       | 75.0% |" in text
    assert "| 4 clients | recent      | 8        | 0        | 0.0%  |" in text
    page = re.sub(r"\s+", " ", html(run))
    assert "<td>context</td><td>40</td><td>30</td><td>75.0 %</td>" in page
    assert "<td>recent</td><td>8</td><td>0</td><td>0.0 %</td>" in page
    assert Page(html(run)).open == []


def test_long_runs_stay_bounded() -> None:
    server = Server()
    few = server.answer(plan.client_step(16, StepBounds(requests=700, warmups=0)))
    text = html(saved([few]))
    assert len(text) < 300_000
    assert "The first 120 of 700." in text


def test_a_comparison_as_markdown() -> None:
    server, slow = Server(), Server(slowed=1.2, seed=1)
    steps = [plan.client_step(count, BOUNDS) for count in (1, 4)]
    first = saved([server.answer(step) for step in steps])
    second = saved([slow.answer(step) for step in steps[:1]], workload={"seed": 1})
    text = comparison(compare(first, second))
    assert "- WARNING: the workload differs: seed 0 and 1" in text
    assert "- WARNING: concurrency 4: only in the first run" in text
    assert re.search(
        r"\| concurrency 1 \| TPOT p50 +\| \d+\.\d\d +\| \d+\.\d\d +\| \+2\d\.\d% ", text
    )
    assert "WORSE" in text
    assert text.splitlines()[-1].startswith("REGRESSION: 0 better, ")
    assert (
        comparison(compare(first, first)).splitlines()[-1].startswith("no regression: 0 better, 0")
    )
    assert "no step in common" in comparison(compare(first, saved([])))


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0, 10, False, [0, 2, 4, 6, 8, 10]),
        (0, 0.7, False, [0, 0.2, 0.4, 0.6]),
        (3, 3, False, None),
        (1, 1000, True, [1, 3, 10, 30, 100, 300, 1000]),
        (1e-9, 1e9, True, None),
        (12, 14, True, None),
    ],
)
def test_axes_have_round_numbers(
    low: float, high: float, log: bool, expected: list[float] | None
) -> None:
    scale = AxisScale(low, high, 0, 100, log)
    ticks = scale.ticks()
    if expected is not None:
        assert ticks == pytest.approx(expected)
    assert 2 <= len(ticks) <= 9
    assert all(-1 <= scale(tick) <= 101 for tick in ticks)


def test_numbers_on_axes_are_short() -> None:
    assert [format_tick(x) for x in (0, 0.25, 12, 1500, 2e6, 3e9)] == [
        "0", "0.25", "12", "1.5k", "2M", "3G",
    ]  # fmt: skip


def test_a_chart_of_one_point_and_of_none() -> None:
    empty = LineChart("empty", "x", "y", [])
    point = ChartPoint(5, 0, label="label <&>")
    one = LineChart("one", "x", "y", [ChartLine([point])], x_log=True, y_log=True)
    for chart in (empty, one):
        ElementTree.fromstring(chart.svg())
