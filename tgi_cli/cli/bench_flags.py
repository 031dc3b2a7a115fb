"""The flags of ``tgi bench``: text-generation-benchmark's, and those of load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tgi_cli.cli.parsers import ratio, share, whole

_TARGET = "What is measured"
_BATCH = "Closed batches"
_LOAD = "Load (choose one)"
_WORKLOAD = "Requests"
_STEP = "Length of a step"
_SAMPLING = "Sampling"
_RESULTS = "Results"


def _option(*names: str, panel: str, help: str, env: str | None = None, **more: Any) -> Any:
    return typer.Option(
        *names, help=help, envvar=env, show_envvar=False, rich_help_panel=panel, **more
    )


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A model of the hub, or a folder: a server is started for it, and stopped. With "
        "--url, the model that requests name.",
        show_default=False,
    ),
]
TokenizerName = Annotated[
    str | None,
    _option(
        "--tokenizer-name",
        "-t",
        panel=_TARGET,
        help="Whose tokenizer counts: a model of the hub, or a folder. Usually the target's.",
        env="TOKENIZER_NAME",
    ),
]
Revision = Annotated[
    str | None,
    _option("--revision", panel=_TARGET, help="Of the model, or of the tokenizer.", env="REVISION"),
]
Socket = Annotated[
    str | None,
    _option(
        "--master-shard-uds-path",
        "-m",
        panel=_TARGET,
        help="Measure the shard behind this socket, without a router. "
        "With -t alone: /tmp/text-generation-server-0.",
        env="MASTER_SHARD_UDS_PATH",
    ),
]
Url = Annotated[
    str | None,
    _option("--url", panel=_TARGET, help="Measure a running server, of any vendor, over HTTP."),
]
ApiKey = Annotated[
    str | None, _option("--api-key", panel=_TARGET, help="Sent as a bearer token.", env="API_KEY")
]
Header = Annotated[
    list[str] | None,
    _option(
        "--header", "-H", panel=_TARGET, metavar="NAME:VALUE", help="Sent too; may be repeated."
    ),
]
RouteFlag = Annotated[
    Literal["auto", "tgi", "completions", "chat"],
    _option("--route", panel=_TARGET, help="tgi is /generate_stream; auto takes what is there."),
]
ServeArguments = Annotated[
    str,
    _option(
        "--serve-args",
        panel=_TARGET,
        metavar="'FLAGS'",
        help="More flags for the server that is started.",
    ),
]
Timeout = Annotated[
    float,
    _option(
        "--timeout", panel=_TARGET, metavar="SECONDS", parser=ratio, help="For a whole request."
    ),
]

BatchSize = Annotated[
    list[int] | None,
    _option(
        "--batch-size",
        "-b",
        panel=_BATCH,
        metavar="N",
        parser=whole(1),
        help="May be repeated. \\[default: 1 2 4 8 16 32]",
    ),
]
SequenceLength = Annotated[
    int | None,
    _option(
        "--sequence-length",
        "-s",
        panel=_BATCH,
        metavar="N",
        parser=whole(1),
        help="Tokens of each prompt. \\[default: 10]",
        env="SEQUENCE_LENGTH",
    ),
]
DecodeLength = Annotated[
    int | None,
    _option(
        "--decode-length",
        "-d",
        panel=_BATCH,
        metavar="N",
        parser=whole(1),
        help="Tokens to generate. \\[default: 8]",
        env="DECODE_LENGTH",
    ),
]
Runs = Annotated[
    int | None,
    _option(
        "--runs",
        "-r",
        panel=_BATCH,
        metavar="N",
        parser=whole(1),
        help="For each batch size. \\[default: 10]",
        env="RUNS",
    ),
]
Warmups = Annotated[
    int,
    _option(
        "--warmups",
        "-w",
        panel=_STEP,
        metavar="N",
        parser=whole(0),
        help="That do not count: runs of a batch, requests of each client or of a rate.",
        env="WARMUPS",
    ),
]

Concurrency = Annotated[
    str | None,
    _option("--concurrency", "-c", panel=_LOAD, metavar="N,N", help="Clients that wait and ask."),
]
Rate = Annotated[
    str | None, _option("--rate", panel=_LOAD, metavar="X,X", help="Requests a second.")
]
Ramp = Annotated[
    str | None,
    _option("--ramp", panel=_LOAD, metavar="X:X", help="A rate that climbs from one to another."),
]
Sweep = Annotated[
    bool,
    _option("--sweep", panel=_LOAD, help="More and more clients, until more get nothing more."),
]
Trace = Annotated[
    Path | None,
    _option(
        "--trace",
        panel=_LOAD,
        metavar="FILE",
        help="Requests as they once came: JSON lines, Mooncake's or with at and prompt.",
    ),
]
Slo = Annotated[
    str | None,
    _option(
        "--slo",
        panel=_LOAD,
        metavar="LIMITS",
        help="Such as ttft:200,tpot:50 (ms; also itl, e2e). Alone it searches the highest rate "
        "that keeps to them; with another load it gives the goodput.",
    ),
]
Attainment = Annotated[
    float,
    _option(
        "--slo-share",
        panel=_LOAD,
        metavar="X",
        parser=share,
        help="Of the requests that must keep to the limits in that search.",
    ),
]
Arrival = Annotated[
    str,
    _option(
        "--arrival",
        panel=_LOAD,
        metavar="PROCESS",
        help="How a rate's requests are spaced: constant, poisson or gamma:BURSTINESS.",
    ),
]
Speed = Annotated[
    float,
    _option("--speed", panel=_LOAD, metavar="X", parser=ratio, help="Of a trace; 2 is twice."),
]

Duration = Annotated[
    float | None,
    _option(
        "--duration",
        panel=_STEP,
        metavar="SECONDS",
        parser=ratio,
        help="Of each step. \\[default: 30, without --requests]",
    ),
]
Requests = Annotated[
    int | None,
    _option(
        "--requests", "-n", panel=_STEP, metavar="N", parser=whole(1), help="Of each step, at most."
    ),
]

InputTokens = Annotated[
    str | None,
    _option(
        "--input-tokens",
        panel=_WORKLOAD,
        metavar="LENGTHS",
        help="Of prompts: 256, uniform:64,256, normal:512,128 or lognormal:512,128,MIN,MAX. "
        "\\[default: 256]",
    ),
]
OutputTokens = Annotated[
    str | None,
    _option(
        "--output-tokens",
        panel=_WORKLOAD,
        metavar="LENGTHS",
        help="Of answers, in the same forms. \\[default: 128, or what a file says]",
    ),
]
PrefixFlag = Annotated[
    str | None,
    _option(
        "--prefix",
        panel=_WORKLOAD,
        metavar="N[:SHARE[:K]]",
        help="So many tokens that prompts begin with alike: a share of them, K different ones.",
    ),
]
Prompts = Annotated[
    Path | None,
    _option(
        "--prompts",
        panel=_WORKLOAD,
        metavar="FILE",
        help="Lines (.txt), JSON lines (.jsonl) or conversations as ShareGPT has them (.json).",
    ),
]
Turns = Annotated[
    str | None,
    _option(
        "--conversations",
        panel=_WORKLOAD,
        metavar="TURNS",
        help="Turns that follow the answers before them: a number, or LENGTHS.",
    ),
]
Think = Annotated[
    float,
    _option(
        "--think",
        panel=_WORKLOAD,
        metavar="SECONDS",
        parser=ratio,
        help="Between an answer and the next turn.",
    ),
]
IgnoreEos = Annotated[
    bool,
    _option(
        "--ignore-eos/--no-ignore-eos",
        panel=_WORKLOAD,
        help="Generate to the last token asked for (not on TGI's route).",
    ),
]
ExtraBody = Annotated[
    str | None,
    _option("--extra-body", panel=_WORKLOAD, metavar="JSON", help="Merged into every request."),
]
Seed = Annotated[
    int,
    _option("--seed", panel=_WORKLOAD, metavar="N", parser=whole(0), help="Of all that is drawn."),
]

Temperature = Annotated[
    float | None,
    _option("--temperature", panel=_SAMPLING, help="Divides the logits.", env="TEMPERATURE"),
]
TopK = Annotated[
    int | None, _option("--top-k", panel=_SAMPLING, help="Of so many tokens.", env="TOP_K")
]
TopP = Annotated[
    float | None, _option("--top-p", panel=_SAMPLING, help="Of so much probability.", env="TOP_P")
]
TypicalP = Annotated[
    float | None,
    _option("--typical-p", panel=_SAMPLING, help="Of so much typical mass.", env="TYPICAL_P"),
]
RepetitionPenalty = Annotated[
    float | None,
    _option("--repetition-penalty", panel=_SAMPLING, help="1 is none.", env="REPETITION_PENALTY"),
]
FrequencyPenalty = Annotated[
    float | None,
    _option("--frequency-penalty", panel=_SAMPLING, help="0 is none.", env="FREQUENCY_PENALTY"),
]
TopNTokens = Annotated[
    int | None,
    _option(
        "--top-n-tokens",
        panel=_SAMPLING,
        help="Alternatives to report of each token.",
        env="TOP_N_TOKENS",
    ),
]
Watermark = Annotated[
    bool, _option("--watermark", panel=_SAMPLING, help="Mark the text.", env="WATERMARK")
]
DoSample = Annotated[
    bool,
    _option(
        "--do-sample", panel=_SAMPLING, help="Draw; else the most likely token.", env="DO_SAMPLE"
    ),
]

Output = Annotated[
    Path | None,
    _option("--output", "-o", panel=_RESULTS, metavar="FILE", help="Everything, as JSON."),
]
Csv = Annotated[
    Path | None,
    _option(
        "--csv", panel=_RESULTS, metavar="FILE", help="A row per step; FILE-requests has the rest."
    ),
]
Jsonl = Annotated[
    Path | None,
    _option("--jsonl", panel=_RESULTS, metavar="FILE", help="Events, while they happen."),
]
Html = Annotated[
    Path | None,
    _option("--html", panel=_RESULTS, metavar="FILE", help="A page with charts, on its own."),
]
Markdown = Annotated[
    Path | None,
    _option("--markdown", panel=_RESULTS, metavar="FILE", help="The tables, also into a file."),
]
Svg = Annotated[
    Path | None,
    _option("--svg", panel=_RESULTS, metavar="FILE", help="The dashboard's last picture."),
]
Ui = Annotated[
    Literal["auto", "tui", "plain", "none"],
    _option(
        "--ui",
        panel=_RESULTS,
        help="The dashboard (tui), a line for each step (plain), or nothing.",
    ),
]
