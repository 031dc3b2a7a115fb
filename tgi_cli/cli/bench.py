"""``tgi bench``: measure a model, a shard or a server; ``view`` and ``compare`` what was saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tgi_cli.cli import bench_flags as flags
from tgi_cli.errors import ConfigError, ExitCode, TgiError

if TYPE_CHECKING:
    from tgi_cli.bench.compare import Comparison
    from tgi_cli.bench.events import BenchRun, Event
    from tgi_cli.bench.plan import BenchOptions
    from tgi_cli.bench.run import BenchConfig


def bench(
    model: flags.Model = None,
    tokenizer_name: flags.TokenizerName = None,
    revision: flags.Revision = None,
    master_shard_uds_path: flags.Socket = None,
    url: flags.Url = None,
    api_key: flags.ApiKey = None,
    header: flags.Header = None,
    route: flags.RouteFlag = "auto",
    serve_args: flags.ServeArguments = "",
    timeout: flags.Timeout = 600.0,
    batch_size: flags.BatchSize = None,
    sequence_length: flags.SequenceLength = None,
    decode_length: flags.DecodeLength = None,
    runs: flags.Runs = None,
    concurrency: flags.Concurrency = None,
    rate: flags.Rate = None,
    ramp: flags.Ramp = None,
    sweep: flags.Sweep = False,
    trace: flags.Trace = None,
    slo: flags.Slo = None,
    slo_share: flags.Attainment = 0.9,
    arrival: flags.Arrival = "poisson",
    speed: flags.Speed = 1.0,
    duration: flags.Duration = None,
    requests: flags.Requests = None,
    warmups: flags.Warmups = 1,
    input_tokens: flags.InputTokens = None,
    output_tokens: flags.OutputTokens = None,
    prefix: flags.PrefixFlag = None,
    prompts: flags.Prompts = None,
    conversations: flags.Turns = None,
    think: flags.Think = 0.0,
    ignore_eos: flags.IgnoreEos = False,
    extra_body: flags.ExtraBody = None,
    seed: flags.Seed = 0,
    temperature: flags.Temperature = None,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    typical_p: flags.TypicalP = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    top_n_tokens: flags.TopNTokens = None,
    watermark: flags.Watermark = False,
    do_sample: flags.DoSample = False,
    output: flags.Output = None,
    csv: flags.Csv = None,
    jsonl: flags.Jsonl = None,
    html: flags.Html = None,
    markdown: flags.Markdown = None,
    svg: flags.Svg = None,
    ui: flags.Ui = "auto",
) -> None:
    """Measure how fast a model, a shard or a server answers.

    `tgi bench MODEL` starts a server of its own and measures batches on its shard, as
    text-generation-benchmark does; `tgi bench --url URL` measures a running server with more and
    more clients. `tgi bench view FILE` opens what --output wrote, `tgi bench compare A B` says
    whether B is worse.
    """
    from tgi_cli.cli.bench_request import measurement, without_secrets

    asked = measurement(dict(locals()), without_secrets(sys.argv))
    _check_outputs(output, csv, jsonl, html, markdown, svg)
    if ui == "none":
        run, interrupted = _quietly(asked, None)
    elif _dashboard(ui):
        run, interrupted = _on_screen(asked, svg), False
    else:
        from tgi_cli.bench.text_output import TextReporter

        _refuse_svg(svg)
        run, interrupted = _quietly(asked, TextReporter(sys.stderr, asked.options.slo))
    if run is not None:
        _leave(run, output=output, csv=csv, html=html, markdown=markdown, silent=ui == "none")
    if interrupted or run is None:
        raise typer.Exit(ExitCode.INTERRUPTED)
    _refuse_nothing(run)


def view(
    file: Annotated[
        str,
        typer.Argument(help="What --output or --jsonl wrote; or the URL of a server to watch."),
    ],
    other: Annotated[
        Path | None,
        typer.Argument(help="A later run, to be shown beside it.", show_default=False),
    ] = None,
    html: flags.Html = None,
    csv: flags.Csv = None,
    markdown: flags.Markdown = None,
    svg: flags.Svg = None,
    ui: flags.Ui = "auto",
) -> None:
    """Open a saved run in the dashboard; without a terminal, print its tables.

    Of two runs the second one is opened, beside the first.
    """
    if file.startswith(("http://", "https://")):
        _watch(file, ui, svg)
        return
    from tgi_cli.bench.saved_runs import load

    _check_outputs(html, csv, markdown, svg)
    run, before = load(Path(file)), None
    if other is not None:
        run, before = load(other), run
    shown = _dashboard(ui)
    if shown:
        from tgi_cli.bench import dashboard

        dashboard.view(run, other=before, svg=svg)
    elif svg is not None:
        from tgi_cli.bench import dashboard

        _write(svg, dashboard.picture(run, other=before))
    silent = shown or ui == "none"
    _leave(run, output=None, csv=csv, html=html, markdown=markdown, silent=silent)
    if before is not None and not silent:
        from tgi_cli.bench.compare import compare as compared
        from tgi_cli.bench.reports import comparison

        print(comparison(compared(before, run)), end="")


def _watch(url: str, ui: str, svg: Path | None) -> None:
    """Show a running server's own figures."""
    if not _dashboard("tui" if ui == "auto" else ui):
        raise ConfigError("a running server is watched in the dashboard", "use --ui tui")
    from tgi_cli.bench import dashboard

    dashboard.watch(url, svg=svg)


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="The run that is the yardstick.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The run that is judged.")],
    fail_on: Annotated[
        str,
        typer.Option(
            metavar="PERCENT",
            help="A change for the worse that is a regression, as 5%; never: nothing is.",
        ),
    ] = "5%",
    markdown: flags.Markdown = None,
) -> None:
    """Compare two saved runs; the exit code is 1 if the second one is worse.

    A figure is worse if its ratio is off by the percentage or more, and the bootstrap interval
    of the ratio leaves out that nothing changed.
    """
    from tgi_cli.bench.compare import compare as compared
    from tgi_cli.bench.reports import comparison
    from tgi_cli.bench.saved_runs import check_writable, load

    check_writable(markdown)
    result = compared(load(first), load(second), _percentage(fail_on))
    text = comparison(result)
    print(text, end="")
    if markdown is not None:
        _write(markdown, text)
    _refuse_regression(result)


class BenchCommand(typer.core.TyperCommand):
    """A command whose first word may be another command: ``view`` or ``compare``.

    A model of that name is given as a path (``./view``).
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """The context of the command that the first word names, or of this one."""
        inner = typer.Typer()
        inner.command()(view)
        inner.command()(compare)
        commands: dict[str, Any] = typer.main.get_group(inner).commands  # type: ignore[assignment]
        if args and args[0] in commands:
            name = f"{info_name} {args[0]}"
            return commands[args[0]].make_context(name, args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


def _dashboard(ui: str) -> bool:
    """Whether the dashboard is to be shown. Raises ConfigError if it was asked for and cannot."""
    from importlib.util import find_spec

    terminal = sys.stdin.isatty() and sys.stderr.isatty()  # tables may go to a file
    installed = all(find_spec(name) is not None for name in ("textual", "textual_plot"))
    if ui == "tui":
        if not installed:
            raise ConfigError("--ui tui: textual is missing", "pip install 'tgi-cli[bench]'")
        if not terminal:
            raise ConfigError("--ui tui: this is no terminal", "use --ui plain")
        return True
    if ui == "auto" and terminal and not installed:
        print("no dashboard: pip install 'tgi-cli[bench]' brings it", file=sys.stderr)
    return ui == "auto" and terminal and installed


def _quietly(asked: BenchConfig, screen: Any) -> tuple[BenchRun | None, bool]:
    """Run in this thread. Returns: the run, and whether Ctrl-C cut it short."""
    from tgi_cli.bench.events import RunEnded
    from tgi_cli.bench.run import BenchJob

    ended: list[BenchRun] = []

    def on_event(event: Event) -> None:
        if isinstance(event, RunEnded):
            ended.append(event.run)
        if screen is not None:
            screen(event)

    job = BenchJob(asked, say=_say if screen is not None else lambda line: None)
    try:
        job.run(on_event, signals=True)
    except KeyboardInterrupt:
        if not ended:
            raise
    return ended[-1], job.interrupted


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _on_screen(asked: BenchConfig, svg: Path | None) -> BenchRun | None:
    """Run in a thread, with the dashboard in this one. Returns None if nobody waited for it."""
    from tgi_cli.bench.dashboard import ScreenOptions, ScreenTitle, run_screen
    from tgi_cli.bench.events import RunEnded
    from tgi_cli.bench.run import BenchJob

    jobs: list[BenchJob] = []

    def start(emit: Any) -> BenchRun:
        jobs.append(BenchJob(asked, say=emit))
        # The screen tells itself of the end.
        return jobs[0].run(lambda event: None if isinstance(event, RunEnded) else emit(event))

    def stop() -> None:
        for job in jobs:
            job.stop()

    headers = dict(asked.settings.headers)
    if asked.settings.api_key:
        headers["authorization"] = f"Bearer {asked.settings.api_key}"
    name = asked.model or asked.address or "the bundled model"
    return run_screen(
        ScreenOptions(
            title=ScreenTitle(name, _details(asked.options)),
            start=start,
            stop=stop,
            url=lambda: jobs[0].url if jobs else None,
            headers=headers,
            slo=asked.options.slo,
            svg=svg,
        )
    )


def _details(options: BenchOptions) -> tuple[str, ...]:
    if options.load == "batch":
        return (
            f"Sequence Length: {options.input_tokens}",
            f"Decode Length: {options.output_tokens}",
        )
    return (options.load,)


def _leave(
    run: BenchRun,
    *,
    output: Path | None,
    csv: Path | None,
    html: Path | None,
    markdown: Path | None,
    silent: bool,
) -> None:
    """Write the files, then the tables: whatever happens to a terminal, the files are there."""
    from tgi_cli.bench import reports, saved_runs

    if output is not None:
        saved_runs.save(run, output)
    if csv is not None:
        saved_runs.save_csv(run, csv)
    if html is not None:
        _write(html, reports.html(run))
    if markdown is None and silent:
        return
    text = reports.markdown(run)
    if markdown is not None:
        _write(markdown, text)
    if not silent:
        print(text, end="")


def _write(path: Path, text: str) -> None:
    from tgi_cli.bench.saved_runs import write

    write(path, text)


def _check_outputs(*paths: Path | None) -> None:
    from tgi_cli.bench.saved_runs import check_writable

    check_writable(*paths)


def _refuse_svg(svg: Path | None) -> None:
    if svg is not None:
        raise ConfigError(
            "--svg is a picture of the dashboard, which does not run here",
            "use --output, then tgi bench view FILE --svg",
        )


def _refuse_nothing(run: BenchRun) -> None:
    """Raises TgiError if nothing at all was measured, or not all that was to be."""
    answered = any(
        record.batches or any(request.error is None for request in record.requests)
        for record in run.steps
    )
    if not answered:
        said = [r.detail or r.error for record in run.steps for r in record.requests if r.error]
        cause = f"nothing was measured: {(said or run.notes or ['no step ran'])[-1]}"
        raise TgiError(cause, "see the server's log")
    if run.failure:
        raise TgiError(run.failure, "the figures are of what ran before")


def _refuse_regression(result: Comparison) -> None:
    if result.regressions:
        raise typer.Exit(ExitCode.FAILURE)


def _percentage(text: str) -> float | None:
    """``5%`` or ``5`` as 0.05; ``never`` as None. Raises ConfigError."""
    if text == "never":
        return None
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise ConfigError(f"--fail-on: {text!r} is no percentage", "for example 5%, or never")
    return value
