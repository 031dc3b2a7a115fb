"""Settings of ``tgi bench``: text-generation-benchmark's, and those of load tests."""

from __future__ import annotations

from tgi_cli.config.settings.setting import BENCH, COMPARE, VIEW, Setting, panel
from tgi_cli.config.settings.values import (
    RATIO,
    SECONDS,
    SHARE,
    SWITCH,
    number,
    one_of,
    path,
    text,
    whole,
    words,
)

_REPORTS = (BENCH, VIEW)

BENCH_SETTINGS = (
    *panel(
        "Target",
        (BENCH,),
        Setting(
            "model",
            text("MODEL"),
            None,
            "Model to benchmark, an id on the hub or a local folder: a server is started for it. "
            "With --url, the model that requests name.",
            argument=True,
        ),
        Setting(
            "tokenizer_name",
            text(),
            None,
            "Tokenizer that counts tokens: a model id or a local folder. Default: the target's.",
            short="t",
            variables=("TOKENIZER_NAME",),
        ),
        Setting(
            "master_shard_uds_path",
            text(),
            None,
            "Benchmark the shard behind this Unix socket, without a router. With -t alone: "
            "/tmp/text-generation-server-0.",
            short="m",
            variables=("MASTER_SHARD_UDS_PATH",),
        ),
        Setting("url", text("URL"), None, "Benchmark a running HTTP server of any vendor."),
        Setting(
            "api_key",
            words("KEY"),
            None,
            "API key, sent as a bearer token; of several, the first.",
            secret=True,
            variables=("API_KEY",),
        ),
        Setting(
            "header",
            words("NAME:VALUE"),
            None,
            "Extra request header; may be repeated.",
            short="H",
            secret=True,
        ),
        Setting(
            "route",
            one_of("ROUTE", "auto", "tgi", "completions", "chat"),
            "auto",
            "API to benchmark: tgi (/generate_stream), completions, chat, or auto (whichever the "
            "server has).",
        ),
        Setting(
            "serve_args", text("'FLAGS'"), "", "Additional flags for the server that is started."
        ),
        Setting("timeout", SECONDS, 600.0, "Request timeout."),
        variables=(),
    ),
    *panel(
        "Closed batches",
        (BENCH,),
        Setting(
            "batch_size",
            whole(1, repeated=True),
            None,
            "Batch size; may be repeated. Default: 1 2 4 8 16 32.",
            short="b",
            variables=(),
        ),
        Setting("sequence_length", whole(1), None, "Prompt tokens. Default: 10.", short="s"),
        Setting("decode_length", whole(1), None, "Tokens to generate. Default: 8.", short="d"),
        Setting("runs", whole(1), None, "Runs per batch size. Default: 10.", short="r"),
    ),
    *panel(
        "Load (choose one)",
        (BENCH,),
        Setting("concurrency", text("N,N"), None, "Concurrent clients (closed loop).", short="c"),
        Setting("rate", text("X,X"), None, "Requests per second (open loop)."),
        Setting("ramp", text("X:X"), None, "Request rate that rises from one value to another."),
        Setting(
            "sweep", SWITCH, False, "Increase concurrency until throughput no longer improves."
        ),
        Setting(
            "trace",
            path("FILE"),
            None,
            "Replay recorded requests: JSON lines, in Mooncake's format or with at and prompt.",
        ),
        Setting(
            "slo",
            text("LIMITS"),
            None,
            "Latency objectives such as ttft:200,tpot:50 (ms; also itl, e2e). Alone: search for "
            "the highest rate that meets them; with another load: report goodput.",
        ),
        Setting("slo_share", SHARE, 0.9, "Share of requests that must meet --slo in that search."),
        Setting(
            "arrival",
            text("PROCESS"),
            "poisson",
            "Arrival process of --rate: constant, poisson or gamma:BURSTINESS.",
        ),
        Setting("speed", RATIO, 1.0, "Replay speed of a trace; 2: twice as fast."),
        variables=(),
    ),
    *panel(
        "Step length",
        (BENCH,),
        Setting("duration", SECONDS, None, "Seconds per step. Default: 30, without --requests."),
        Setting("requests", whole(1), None, "Maximum requests per step.", short="n"),
        Setting(
            "warmups",
            whole(0),
            1,
            "Warm-up runs per batch size, or warm-up requests per client or rate, not measured.",
            short="w",
            variables=("WARMUPS",),
        ),
        variables=(),
    ),
    *panel(
        "Workload",
        (BENCH,),
        Setting(
            "input_tokens",
            text("LENGTHS"),
            None,
            "Prompt lengths: 256, uniform:64,256, normal:512,128 or lognormal:512,128,MIN,MAX. "
            "Default: 256.",
        ),
        Setting(
            "output_tokens",
            text("LENGTHS"),
            None,
            "Output lengths, in the same forms. Default: 128, or those of a file.",
        ),
        Setting(
            "prefix",
            text("N[:SHARE[:K]]"),
            None,
            "Tokens of a shared prefix; the share of prompts that have one, and the number of "
            "different prefixes.",
        ),
        Setting(
            "prompts",
            path("FILE"),
            None,
            "Prompts: lines (.txt), JSON lines (.jsonl) or ShareGPT conversations (.json).",
        ),
        Setting(
            "conversations",
            text("TURNS"),
            None,
            "Turns per conversation, each with the answers before it: a number, or LENGTHS.",
        ),
        Setting("think", SECONDS, 0.0, "Pause between an answer and the next turn."),
        Setting(
            "ignore_eos",
            SWITCH,
            False,
            "Ignore the end-of-sequence token (not on TGI's route).",
            negative=True,
        ),
        Setting("extra_body", text("JSON"), None, "JSON object to merge into every request body."),
        Setting("seed", whole(0), 0, "Random seed."),
        variables=(),
    ),
    *panel(
        "Sampling",
        (BENCH,),
        Setting("temperature", RATIO, None, "Sampling temperature."),
        Setting("top_k", whole(0), None, "Sample from the k most likely tokens."),
        Setting("top_p", RATIO, None, "Nucleus sampling: cumulative probability."),
        Setting("typical_p", RATIO, None, "Typical sampling: cumulative probability."),
        Setting("repetition_penalty", RATIO, None, "Repetition penalty; 1: none."),
        Setting("frequency_penalty", number(-100, 100), None, "Frequency penalty; 0: none."),
        Setting("top_n_tokens", whole(0), None, "Number of top tokens to report per token."),
        Setting("watermark", SWITCH, False, "Watermark the text."),
        Setting("do_sample", SWITCH, False, "Sample; otherwise greedy."),
    ),
    *panel(
        "Results",
        _REPORTS,
        Setting(
            "output",
            path("FILE"),
            None,
            "Save everything as JSON, for view and compare.",
            (BENCH,),
            short="o",
        ),
        Setting(
            "csv",
            path("FILE"),
            None,
            "Write a CSV row per step, and one per request to FILE-requests.",
        ),
        Setting("jsonl", path("FILE"), None, "Write events as they happen.", (BENCH,)),
        Setting("html", path("FILE"), None, "Write a self-contained HTML page with charts."),
        Setting("markdown", path("FILE"), None, "Also write the tables.", (*_REPORTS, COMPARE)),
        Setting("svg", path("FILE"), None, "Save the final screenshot of the dashboard."),
        Setting(
            "ui",
            one_of("UI", "auto", "tui", "plain", "none"),
            "auto",
            "Output on the terminal: tui (dashboard), plain (a line per step), none, or auto.",
        ),
        Setting(
            "file",
            text("FILE"),
            None,
            "Run saved with --output or --jsonl, or the URL of a server to watch.",
            (VIEW,),
            argument=True,
            required=True,
        ),
        Setting(
            "other", path("FILE"), None, "Second run, to compare with.", (VIEW,), argument=True
        ),
        Setting(
            "first", path("A"), None, "Baseline run.", (COMPARE,), argument=True, required=True
        ),
        Setting(
            "second", path("B"), None, "Run to evaluate.", (COMPARE,), argument=True, required=True
        ),
        Setting(
            "fail_on",
            text("PERCENT"),
            "5%",
            "Change for the worse that counts as a regression, as 5%; never: none.",
            (COMPARE,),
        ),
        variables=(),
    ),
)
