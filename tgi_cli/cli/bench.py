"""``tgi bench``: benchmark a model, a shard or a server; ``view`` and ``compare`` saved runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import SettingsCommand, takes
from tgi_cli.config.settings.setting import BENCH, COMPARE, VIEW
from tgi_cli.errors import ConfigError, ExitCode, TgiError
from tgi_cli.process.terminal import terminal_width

if TYPE_CHECKING:
    from tgi_cli.bench.compare import Comparison
    from tgi_cli.bench.events import BenchRun, Event
    from tgi_cli.bench.plan import BenchOptions
    from tgi_cli.bench.run import BenchConfig
    from tgi_cli.bench.settings import RequestSettings


@takes(
    BENCH,
    ("tgi bench ./my-model -b 1 -b 8 -s 128 -d 32", "batches on a shard"),
    ("tgi bench --url http://host:3000 -o run.json", "increasing clients"),
    ("tgi bench --url http://host:3000 --slo ttft:200,tpot:50", "highest rate"),
    ("tgi bench view run.json", "open a saved run"),
    ("tgi bench compare before.json after.json", "fails if worse"),
)
def bench(settings: ParsedSettings) -> None:
    """Benchmark a model, a shard or a server.

    `tgi bench MODEL` starts a server and measures batches on its shard, as
    text-generation-benchmark does; `tgi bench --url URL` measures a running server with
    increasing concurrency. `tgi bench view FILE` opens a run saved with --output, `tgi bench
    compare A B` fails if B is worse.
    """
    from tgi_cli.cli.bench_request import bench_config

    config = bench_config(settings)
    ui, svg = settings["ui"], settings["svg"]
    _check_outputs(settings)
    if ui == "none":
        run, interrupted = _run(config, None)
    elif _use_dashboard(ui):
        run, interrupted = _run_in_dashboard(config, svg), False
    else:
        from tgi_cli.bench.text_output import TextReporter

        if svg is not None:
            raise ConfigError(
                "--svg is a screenshot of the dashboard, which does not run here",
                "use --output, then tgi bench view FILE --svg",
            )
        run, interrupted = _run(config, TextReporter(sys.stderr, config.options.slo))
    if run is not None:
        _save(run, settings, silent=ui == "none")
    if interrupted or run is None:
        raise typer.Exit(ExitCode.INTERRUPTED)
    _check_measured(run)


@takes(
    VIEW,
    ("tgi bench view run.json", "open a saved run"),
    ("tgi bench view before.json after.json", "two runs side by side"),
    ("tgi bench view http://127.0.0.1:3000", "watch a server"),
    ("tgi bench view run.json --ui none --html run.html", "a report"),
)
def view(settings: ParsedSettings) -> None:
    """Open a saved run in the dashboard; without a terminal, print its tables.

    Of two runs, the second is opened beside the first.
    """
    file, other, ui, svg = (settings[name] for name in ("file", "other", "ui", "svg"))
    if file.startswith(("http://", "https://")):
        _watch(file, ui, svg)
        return
    from tgi_cli.bench.saved_runs import load

    _check_outputs(settings)
    run, baseline = load(Path(file)), None
    if other is not None:
        run, baseline = load(other), run
    shown = _use_dashboard(ui)
    if shown:
        from tgi_cli.bench import dashboard

        dashboard.view(run, other=baseline, svg=svg)
    elif svg is not None:
        from tgi_cli.bench import dashboard
        from tgi_cli.bench.saved_runs import write

        write(svg, dashboard.picture(run, other=baseline))
    silent = shown or ui == "none"
    _save(run, settings, silent=silent)
    if baseline is not None and not silent:
        from tgi_cli.bench.compare import compare as compared
        from tgi_cli.bench.reports import comparison

        print(comparison(compared(baseline, run), _width()), end="")


def _watch(url: str, ui: str, svg: Path | None) -> None:
    """Show a running server's own metrics."""
    if not _use_dashboard("tui" if ui == "auto" else ui):
        raise ConfigError("a running server is watched in the dashboard", "use --ui tui")
    from tgi_cli.bench import dashboard

    dashboard.watch(url, svg=svg)


@takes(
    COMPARE,
    ("tgi bench compare before.json after.json", "fails if worse"),
    ("tgi bench compare before.json after.json --fail-on never", "only print"),
)
def compare(settings: ParsedSettings) -> None:
    """Compare two saved runs; the exit code is 1 if the second one is worse.

    A metric is worse if its ratio is off by the percentage or more, and the bootstrap interval of
    the ratio excludes 1.
    """
    from tgi_cli.bench.compare import compare as compared
    from tgi_cli.bench.reports import comparison
    from tgi_cli.bench.saved_runs import load, write

    _check_outputs(settings)
    threshold = _parse_percentage(settings["fail_on"])
    result: Comparison = compared(load(settings["first"]), load(settings["second"]), threshold)
    print(comparison(result, _width()), end="")
    if settings["markdown"] is not None:
        write(settings["markdown"], comparison(result))
    if result.regressions:
        raise typer.Exit(ExitCode.FAILURE)


class BenchCommand(SettingsCommand):
    """A command whose first word may be another command: ``view`` or ``compare``.

    A model of that name is given as a path (``./view``).
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """The context of the command that the first word names, or of this one."""
        inner = typer.Typer()
        inner.command(cls=SettingsCommand)(view)
        inner.command(cls=SettingsCommand)(compare)
        commands: dict[str, Any] = typer.main.get_group(inner).commands  # type: ignore[assignment]
        if args and args[0] in commands:
            name = f"{info_name} {args[0]}"
            return commands[args[0]].make_context(name, args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


bench.command_class = BenchCommand  # type: ignore[attr-defined]
bench.commands = {"view": view, "compare": compare}  # type: ignore[attr-defined]


def _use_dashboard(ui: str) -> bool:
    """Whether to show the dashboard. Raises ConfigError if it was requested and cannot run."""
    from importlib.util import find_spec

    from tgi_cli.process.installation import install_command

    terminal = sys.stdin.isatty() and sys.stderr.isatty()  # tables may go to a file
    installed = all(find_spec(name) is not None for name in ("textual", "textual_plot"))
    if ui == "tui":
        if not installed:
            raise ConfigError("--ui tui: textual is missing", install_command("bench"))
        if not terminal:
            raise ConfigError("--ui tui: this is not a terminal", "use --ui plain")
        return True
    if ui == "auto" and terminal and not installed:
        print(f"no dashboard: {install_command('bench')} brings it", file=sys.stderr)
    return ui == "auto" and terminal and installed


def _run(config: BenchConfig, reporter: Any) -> tuple[BenchRun | None, bool]:
    """Run in this thread. Returns the run, and whether Ctrl-C interrupted it."""
    from tgi_cli.bench.events import RunEnded
    from tgi_cli.bench.run import BenchJob

    ended: list[BenchRun] = []

    def on_event(event: Event) -> None:
        if isinstance(event, RunEnded):
            ended.append(event.run)
        if reporter is not None:
            reporter(event)

    job = BenchJob(config, log_line=_print if reporter is not None else lambda line: None)
    try:
        job.run(on_event, signals=True)
    except KeyboardInterrupt:
        if not ended:
            raise
    return ended[-1], job.interrupted


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run_in_dashboard(config: BenchConfig, svg: Path | None) -> BenchRun | None:
    """Run in a thread, the dashboard in this one. Returns None if the user quit before the end."""
    from tgi_cli.bench.dashboard import run_screen
    from tgi_cli.bench.dashboard.run_state import ScreenTitle
    from tgi_cli.bench.dashboard.views import ScreenOptions
    from tgi_cli.bench.events import RunEnded
    from tgi_cli.bench.run import BenchJob

    jobs: list[BenchJob] = []

    def start(emit: Any) -> BenchRun:
        jobs.append(BenchJob(config, log_line=emit))
        # The screen detects the end itself.
        return jobs[0].run(lambda event: None if isinstance(event, RunEnded) else emit(event))

    def stop() -> None:
        for job in jobs:
            job.stop()

    name = config.model or config.address or "the bundled model"
    return run_screen(
        ScreenOptions(
            title=ScreenTitle(name, _details(config.options, config.settings)),
            start=start,
            stop=stop,
            model=lambda: jobs[0].model if jobs else "",
            url=lambda: jobs[0].url if jobs else None,
            headers=config.settings.all_headers,
            slo=config.options.slo,
            svg=svg,
        )
    )


def _details(options: BenchOptions, settings: RequestSettings) -> tuple[str, ...]:
    from tgi_cli.bench.dashboard.run_state import lengths_of
    from tgi_cli.bench.workloads.build import described

    lengths = lengths_of(described(options, settings, ""))
    return lengths if options.load == "batch" else (*lengths, options.load)


def _save(run: BenchRun, settings: ParsedSettings, *, silent: bool) -> None:
    """Write the files before printing the tables: they are safe whatever happens to a terminal."""
    from tgi_cli.bench import reports, saved_runs

    csv, html, markdown = (settings[name] for name in ("csv", "html", "markdown"))
    if settings.get("output") is not None:
        saved_runs.save(run, settings["output"])
    if csv is not None:
        saved_runs.save_csv(run, csv)
    if html is not None:
        saved_runs.write(html, reports.html(run))
    if markdown is not None:
        saved_runs.write(markdown, reports.markdown(run))
    if not silent:
        print(reports.markdown(run, _width()), end="")


def _width() -> int | None:
    """The width of the terminal that stdout is, or None."""
    return terminal_width() if sys.stdout.isatty() else None


def _check_outputs(settings: ParsedSettings) -> None:
    """Raise ConfigError for a file that cannot be written, before anything runs."""
    from tgi_cli.bench.saved_runs import check_writable

    names = ("output", "csv", "jsonl", "html", "markdown", "svg")
    check_writable(*(settings.get(name) for name in names))


def _check_measured(run: BenchRun) -> None:
    """Raise TgiError if nothing was measured, or the run ended early."""
    answered = any(
        record.batches or any(request.error is None for request in record.requests)
        for record in run.steps
    )
    if not answered:
        errors = [r.detail or r.error for record in run.steps for r in record.requests if r.error]
        cause = f"nothing was measured: {(errors or run.notes or ['no step ran'])[-1]}"
        raise TgiError(cause, "see the server's log")
    if run.failure:
        raise TgiError(run.failure, "the results cover what ran before")


def _parse_percentage(text: str) -> float | None:
    """Parse ``5%`` or ``5`` as 0.05, ``never`` as None. Raises ConfigError."""
    if text == "never":
        return None
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise ConfigError(f"--fail-on: {text!r} is not a percentage", "for example 5%, or never")
    return value
