import numpy as np
import pytest
from rich.text import Text
from textual.app import App, ComposeResult

from tests.unit.bench.dashboard.cells import of_picture
from tests.unit.bench.dashboard.script import batch_run, batch_step, http_run, http_step
from tgi_cli.bench.compare import compare
from tgi_cli.bench.dashboard import ScreenTitle, histogram, widgets
from tgi_cli.bench.dashboard.charts import RoundTicks, limits
from tgi_cli.bench.dashboard.formatting import COLORS, fitted, seconds, short, step_color
from tgi_cli.bench.dashboard.metrics import panels
from tgi_cli.bench.dashboard.views import compare as comparison
from tgi_cli.bench.dashboard.views import percentiles
from tgi_cli.bench.dashboard.views.requests import TimelineRow, bars, rows_of
from tgi_cli.bench.dashboard.views.steps import heading_of_histogram, statistics
from tgi_cli.bench.statistics.metrics import step_metrics


def test_numbers_fit_their_columns() -> None:
    values = [0.0, 0.001234, 1.5, 99.999, 123456.789, 9.87e8, 1.2e12, -5.25]
    assert [fitted(value, 8) for value in values] == [
        *("0.00", "0.00", "1.50", "100.00", "123456.8", "987M", "1200G", "-5.25")
    ]
    assert [fitted(None), fitted(float("nan")), fitted(float("inf"))] == ["-", "-", "-"]
    assert [short(value) for value in (0, 0.0123, 1.234, 12.34, 123.4, 999.9, 1234, 2e6)] == [
        *("0", "0.0123", "1.23", "12.3", "123", "1.00k", "1.23k", "2.00M")
    ]
    assert [seconds(value) for value in (0.5, 12.34, 75, 3700)] == [
        *("0.50 s", "12.3 s", "1:15", "1:01:40")
    ]
    for low, high in ((0.001, 9.99), (99.96, 9999.4), (12345.0, 999_000.0), (1e9, 2e9)):
        assert len(percentiles.span_of(low, high)) <= 9


def test_a_histogram_has_all_values_and_stays_in_its_box() -> None:
    values = np.concatenate([np.linspace(10, 12, 90), np.linspace(50, 60, 10)])
    text = histogram.draw_histogram(values, 30, 9, style="red").plain.split("\n")
    assert len(text) <= 9
    assert max(map(len, text)) <= 30
    assert sum(int(line.split()[-1]) for line in text) == 100
    zoomed = histogram.draw_histogram(values, 30, 9, style="red", zoom=3).plain.split("\n")
    assert sum(int(line.split()[-1]) for line in zoomed) == 80
    assert histogram.draw_histogram(np.zeros(0), 30, 9, style="red").plain == "no values yet"
    assert (
        len(histogram.draw_histogram(np.full(5, 3.25), 12, 4, style="red").plain.split("\n")) <= 4
    )


@pytest.mark.parametrize("height", [2, 3, 5, 8, 9, 12, 20])
@pytest.mark.parametrize("spread", [1e-6, 0.3, 7.0, 1e6])
def test_no_histogram_is_taller_than_its_box(height: int, spread: float) -> None:
    values = 0.1 + spread * np.random.default_rng(1).random(500)
    text = histogram.draw_histogram(values, 24, height, style="red").plain.split("\n")
    assert len(text) <= height
    assert sum(int(line.split()[-1]) for line in text) == 500


def test_columns_rise_from_zero_to_the_top() -> None:
    assert histogram.columns([0, 1, 2, 3, 4], 5, 2, 4) == ["   ▄█", " ▄███"]
    assert histogram.columns([0.001], 3, 2, 100) == ["   ", "  ▁"]
    assert histogram.columns([1, 2, 3], 2, 1, 3) == ["▅█"]


def test_the_first_view_has_tgis_figures_of_a_batch() -> None:
    record = batch_step(4)
    found = panels(record)
    runs = [batch for batch in record.batches if not batch.warmup]
    prefill = [batch.prefill * 1000 for batch in runs]
    summary = found.prefill.columns["ms"]
    assert summary is not None
    assert summary.mean == pytest.approx(np.mean(prefill))
    assert found.prefill.throughput == pytest.approx([4 * 10 / (ms / 1000) for ms in prefill])
    total = found.decode.columns["total ms"]
    assert total is not None
    assert total.maximum == pytest.approx(max(sum(batch.decodes) for batch in runs) * 1000)
    text = statistics(found.decode, 28, 9).plain.split("\n")
    assert len(text) == 9
    assert text[0].split() == ["total", "ms", "token", "ms"]
    assert [line.split()[0] for line in text[1:7]] == [
        *("Average", "Lowest", "Highest", "p50", "p90", "p99")
    ]
    assert len(statistics(found.decode, 28, 12).plain.split("\n")) <= 12


def test_a_step_over_http_has_one_point_and_both_latencies() -> None:
    found = panels(http_step(4))
    assert list(found.prefill.columns) == ["TTFT ms"]
    assert list(found.decode.columns) == ["E2E ms", "ITL ms"]
    assert len(found.prefill.latency) == len(found.decode.throughput) == 1
    assert len(found.decode.values) == (60 - 1) * 23  # every gap, without the warm-up's


def test_a_step_without_results_draws_dashes() -> None:
    record = batch_step(2, runs=0)
    found = panels(record)
    assert len(found.prefill.latency) == 0
    assert "-" in statistics(found.prefill, 19, 9).plain
    failed = http_step(16, requests=9)
    only = [request for request in failed.requests if request.error]
    metrics = step_metrics(type(failed)(step=failed.step, began=0, duration=1, requests=only))
    text = percentiles.draw_percentiles(metrics, 79, slo={}).plain
    assert "1 failed: 1 x http 429" in text
    assert "every request failed" in text


def test_headings_of_histograms_fit_before_there_are_results() -> None:
    batches, step = panels(batch_step(2, runs=0)), http_step(4)
    requests = panels(type(step)(step=step.step, began=0, duration=1, requests=[]))
    assert heading_of_histogram(batches.decode, "Decode") == "Decode token ms"
    assert heading_of_histogram(requests.prefill, "First token") == "TTFT ms"
    assert heading_of_histogram(requests.decode, "Decode") == "ITL ms"


@pytest.mark.parametrize("width", [79, 139])
def test_the_percentile_table_fits(width: int) -> None:
    run = http_run()
    metrics = step_metrics(run.steps[1], run.slo)
    text = percentiles.draw_percentiles(metrics, width, slo=run.slo).plain
    assert max(map(len, text.split("\n"))) <= width
    for word in ("TTFT", "ITL", "TPOT", "E2E", "mean", "p99.9", "Goodput", "within TTFT 100 ms"):
        assert word in text
    p99 = metrics.latencies["itl"].p99
    assert f"{p99:.2f}" in text
    assert percentiles.span_of(*metrics.latencies["itl"].intervals["p99"]) in text


def test_comparisons_name_what_became_worse() -> None:
    found = compare(http_run(), http_run(slower=1.5))
    for width in (79, 139):
        text = comparison.draw_comparison(found, width).plain
        assert max(map(len, text.split("\n"))) <= width
        assert "concurrency 4" in text
        itl = next(line for line in text.split("\n") if line.startswith("ITL p50"))
        assert "worse" in itl
        assert "+5" in itl
        assert "metrics are worse" in text
    assert (
        "No metric is worse"
        in comparison.draw_comparison(compare(http_run(), http_run()), 79).plain
    )


def test_changes_fit_their_columns() -> None:
    ratios = (1.0, 1.123, 0.0, 0.5, 2.2, 10.99, 12.4, 1e9, float("inf"))
    assert [comparison.change(ratio) for ratio in ratios] == [
        *("+0.0 %", "+12.3 %", "-100 %", "-50.0 %", "+120 %", "+999 %", "x12", "> x1000"),
        "> x1000",
    ]


def test_bars_of_a_request() -> None:
    row = TimelineRow("#1", due=1.0, sent=2.0, first=4.0, last=8.0, tokens=5)
    assert bars(row, 0.0, 10.0, 10) == (" ", "·", "▒▒", "████")
    assert bars(row, 5.0, 10.0, 10) == ("", "", "", "██████")
    assert bars(row, 9.0, 10.0, 10) == ("", "", "", "")
    short_one = TimelineRow("#2", due=3.0, sent=3.0, first=3.0, last=3.0001, tokens=1)
    assert "".join(bars(short_one, 0.0, 10.0, 10)).strip() == "█"
    at_the_end = TimelineRow("#3", due=9.99, sent=9.99, first=10.0, last=10.0, tokens=1)
    assert len("".join(bars(at_the_end, 0.0, 10.0, 10))) <= 10


def test_rows_come_in_the_order_they_were_due() -> None:
    rows = rows_of(http_step(4))
    assert [row.due for row in rows] == sorted(row.due for row in rows)
    runs = rows_of(batch_step(2, runs=3))
    assert [row.label for row in runs] == ["run 0", "run 1", "run 2", "run 3"]
    assert runs[1].due == runs[0].last


def test_axes() -> None:
    values = [np.array([10.0, 20.0]), np.array([40.0])]
    assert limits(values, 40.0, 0) == (0.0, 44.0)
    low, high = limits(values, 40.0, 1)
    assert low < 10 < 40 < high
    near = limits(values, 40.0, 3)
    assert near[0] > low
    assert sum(near) / 2 == pytest.approx(40.0)
    ticks = RoundTicks()
    for most in (1, 2, 3, 5, 8):
        ticks.most = most
        for span in ((0.0, 44.0), (9.97, 10.03), (0.0, 123_456.0), (-1.0, 1.0)):
            places, labels = ticks.get_ticks_and_labels(*span)
            assert 1 <= len(places) <= most + 1
            assert all(span[0] <= place <= span[1] for place in places)
            assert len(set(labels)) == len(labels)
    assert ticks.get_ticks(1.0, 1.0) == []


def test_a_long_model_name_loses_its_front_and_the_lengths_stay() -> None:
    title = ScreenTitle(
        "模型/" + "very-long-" * 9 + "tail-7B", ("Sequence Length: 10", "Decode Length: 8")
    )
    line = widgets.head_line(title, "3 in flight", 80)
    assert line.cell_len <= 80
    assert line.plain.startswith("…")
    assert "tail-7B | Sequence Length: 10 | Decode Length: 8" in line.plain
    wide = widgets.head_line(ScreenTitle("模型", ("Decode Length: 8",)), "3 in flight", 80).plain
    assert wide.startswith("模型 | Decode Length: 8")
    assert wide.endswith("3 in flight")


def test_details_that_do_not_fit_are_left_out_whole() -> None:
    title = ScreenTitle("m" * 30, ("Input Length: 256", "Output Length: 128", "at a long address"))
    line = widgets.head_line(title, "", 80).plain
    assert line.rstrip().endswith("m | Input Length: 256 | Output Length: 128")


def test_colours_differ_and_come_round() -> None:
    for dark in (True, False):
        assert len({step_color(index, dark) for index in range(COLORS)}) == COLORS
        assert step_color(COLORS, dark) == step_color(0, dark)


@pytest.mark.parametrize(("dark", "background"), [(True, "#121212"), (False, "#e0e0e0")])
def test_colours_can_be_read_on_their_background(dark: bool, background: str) -> None:
    def luminance(code: str) -> float:
        parts = [int(code[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for index in range(COLORS):
        pair = sorted([luminance(step_color(index, dark)), luminance(background)])
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, step_color(index, dark)


async def test_lines_of_a_text_are_whole_beside_its_scroll_bar() -> None:
    class Shown(App[None]):
        def compose(self) -> ComposeResult:
            yield widgets.TextView(id="text")

    line = "a verdict that is " + "whole"
    app = Shown()
    async with app.run_test(size=(len(line) + 1, 5)) as pilot:
        view = app.query_one(widgets.TextView)
        view.show("a key", lambda: Text("\n".join([line] * 20), no_wrap=True, overflow="crop"))
        await pilot.pause()
        assert view.show_vertical_scrollbar
        shown = of_picture(app.export_screenshot())
    assert all(row.startswith(line) for row in shown)


@pytest.mark.parametrize("width", [14, 20, 39])
def test_rates_of_batches_are_named_apart_from_latencies_at_any_width(width: int) -> None:
    rows = compare(batch_run(), batch_run()).rows
    names = [(row.step, comparison.name_of(row, width)) for row in rows]
    assert len(set(names)) == len(names) > 0
    assert all(len(name) <= width for _, name in names)
