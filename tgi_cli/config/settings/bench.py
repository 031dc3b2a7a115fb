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
        variables=(),
        model=Setting(
            text("MODEL"),
            "Model to benchmark, an id on the hub, a folder or a GGUF file: a server is started "
            "for it. With --url, the model that requests name.",
            brief="Id on the hub, a folder or a GGUF file.",
            argument=True,
        ),
        tokenizer_name=Setting(
            text("MODEL"),
            "Tokenizer that counts tokens: a model id or a local folder. Default: the target's.",
            short="t",
            variables=("TOKENIZER_NAME",),
            brief="Tokenizer that counts tokens.",
        ),
        master_shard_uds_path=Setting(
            text("PATH"),
            "Benchmark the shard behind this Unix socket, without a router. With -t alone: "
            "/tmp/text-generation-server-0.",
            short="m",
            variables=("MASTER_SHARD_UDS_PATH",),
            brief="Benchmark the shard behind this socket.",
        ),
        url=Setting(
            text("URL"),
            "Benchmark a running HTTP server of any vendor.",
            brief="Benchmark a running server of any vendor.",
        ),
        api_key=Setting(
            words("KEY"),
            "API key, sent as a bearer token; of several, the first.",
            secret=True,
            variables=("API_KEY",),
            brief="API key, sent as a bearer token.",
        ),
        header=Setting(
            words("NAME:VALUE"), "Extra request header; may be repeated.", short="H", secret=True
        ),
        route=Setting(
            one_of("ROUTE", "auto", "tgi", "completions", "chat"),
            "API to benchmark: tgi (/generate_stream), completions, chat, or auto (whichever the "
            "server has).",
            "auto",
            brief="tgi, completions, chat or auto.",
        ),
        serve_args=Setting(text("'FLAGS'"), "Additional flags for the server that is started.", ""),
        timeout=Setting(SECONDS, "Request timeout.", 600.0),
    ),
    *panel(
        "Closed batches",
        (BENCH,),
        batch_size=Setting(
            whole(1, repeated=True),
            "Batch size; may be repeated. Default: 1 2 4 8 16 32.",
            short="b",
            variables=(),
            brief="Batch size; may be repeated.",
        ),
        sequence_length=Setting(
            whole(1), "Prompt tokens. Default: 10.", short="s", brief="Prompt tokens. Default: 10."
        ),
        decode_length=Setting(
            whole(1),
            "Tokens to generate. Default: 8.",
            short="d",
            brief="Tokens to generate. Default: 8.",
        ),
        runs=Setting(
            whole(1),
            "Runs per batch size. Default: 10.",
            short="r",
            brief="Runs per batch size. Default: 10.",
        ),
    ),
    *panel(
        "Load (choose one)",
        (BENCH,),
        variables=(),
        concurrency=Setting(
            text("N,N"),
            "Concurrent clients (closed loop).",
            short="c",
            brief="Concurrent clients, as 1,8,64.",
        ),
        rate=Setting(
            text("X,X"), "Requests per second (open loop).", brief="Requests per second, as 0.5,2."
        ),
        ramp=Setting(text("X:X"), "Request rate that rises from one value to another."),
        sweep=Setting(
            SWITCH,
            "Increase concurrency until throughput no longer improves.",
            brief="More clients until throughput no longer grows.",
        ),
        trace=Setting(
            path("FILE"),
            "Replay recorded requests: JSON lines, in Mooncake's format or with at and prompt.",
            brief="Replay recorded requests.",
        ),
        slo=Setting(
            text("LIMITS"),
            "Latency objectives such as ttft:200,tpot:50 (ms; also itl, e2e). Alone: search for "
            "the highest rate that meets them; with another load: report goodput.",
            brief="Find the highest rate within ttft:200,tpot:50.",
        ),
        slo_share=Setting(SHARE, "Share of requests that must meet --slo in that search.", 0.9),
        arrival=Setting(
            text("PROCESS"),
            "Arrival process of --rate: constant, poisson or gamma:BURSTINESS.",
            "poisson",
        ),
        speed=Setting(RATIO, "Replay speed of a trace; 2: twice as fast.", 1.0),
    ),
    *panel(
        "Step length",
        (BENCH,),
        variables=(),
        duration=Setting(
            SECONDS,
            "Seconds per step. Default: 30, without --requests.",
            brief="Seconds per step. Default: 30.",
        ),
        requests=Setting(
            whole(1), "Maximum requests per step.", short="n", brief="Maximum requests per step."
        ),
        warmups=Setting(
            whole(0),
            "Warm-up runs per batch size, or warm-up requests per client or rate, not measured.",
            1,
            short="w",
            variables=("WARMUPS",),
            brief="Runs or requests not measured.",
        ),
    ),
    *panel(
        "Workload",
        (BENCH,),
        variables=(),
        input_tokens=Setting(
            text("LENGTHS"),
            "Prompt lengths: 256, uniform:64,256, normal:512,128 or lognormal:512,128,MIN,MAX. "
            "Default: 256.",
            brief="Prompt lengths, as 256 or uniform:64,256.",
        ),
        output_tokens=Setting(
            text("LENGTHS"),
            "Output lengths, in the same forms. Default: 128, or those of a file.",
            brief="Output lengths, in the same forms.",
        ),
        prefix=Setting(
            text("N[:SHARE[:K]]"),
            "Tokens of a shared prefix; the share of prompts that have one, and the number of "
            "different prefixes.",
        ),
        images=Setting(
            text("N[xWIDTHxHEIGHT][:SHARE]"),
            "Images of every prompt, random and distinct, and the share of them that an earlier "
            "prompt had. Default size: 512x512.",
        ),
        prompts=Setting(
            path("FILE"),
            "Prompts: lines (.txt), JSON lines (.jsonl) or ShareGPT conversations (.json).",
            brief="Prompts from a file.",
        ),
        conversations=Setting(
            text("TURNS"),
            "Turns per conversation, each with the answers before it: a number, or LENGTHS.",
            brief="Turns per conversation.",
        ),
        think=Setting(SECONDS, "Pause between an answer and the next turn.", 0.0),
        ignore_eos=Setting(
            SWITCH, "Ignore the end-of-sequence token (not on TGI's route).", negative=True
        ),
        extra_body=Setting(text("JSON"), "JSON object to merge into every request body."),
        seed=Setting(whole(0), "Random seed.", 0),
    ),
    *panel(
        "Sampling",
        (BENCH,),
        temperature=Setting(RATIO, "Sampling temperature."),
        top_k=Setting(whole(0), "Sample from the k most likely tokens."),
        top_p=Setting(RATIO, "Nucleus sampling: cumulative probability."),
        typical_p=Setting(RATIO, "Typical sampling: cumulative probability."),
        repetition_penalty=Setting(RATIO, "Repetition penalty; 1: none."),
        frequency_penalty=Setting(number(-100, 100), "Frequency penalty; 0: none."),
        top_n_tokens=Setting(whole(0), "Number of top tokens to report per token."),
        watermark=Setting(SWITCH, "Watermark the text."),
        do_sample=Setting(SWITCH, "Sample; otherwise greedy."),
    ),
    *panel(
        "Results",
        _REPORTS,
        variables=(),
        output=Setting(
            path("FILE"),
            "Save everything as JSON, for view and compare.",
            commands=(BENCH,),
            short="o",
            brief="Save everything as JSON, for view and compare.",
        ),
        csv=Setting(
            path("FILE"), "Write a CSV row per step, and one per request to FILE-requests."
        ),
        jsonl=Setting(path("FILE"), "Write events as they happen.", commands=(BENCH,)),
        html=Setting(
            path("FILE"),
            "Write a self-contained HTML page with charts.",
            brief="Write a page with charts.",
        ),
        markdown=Setting(
            path("FILE"),
            "Also write the tables.",
            commands=(*_REPORTS, COMPARE),
            brief="Also write the tables.",
        ),
        svg=Setting(path("FILE"), "Save the final screenshot of the dashboard."),
        ui=Setting(
            one_of("UI", "auto", "tui", "plain", "none"),
            "Output on the terminal: tui (dashboard), plain (a line per step), none, or auto.",
            "auto",
            brief="tui, plain, none or auto.",
        ),
        file=Setting(
            text("FILE"),
            "Run saved with --output or --jsonl, or the URL of a server to watch.",
            commands=(VIEW,),
            argument=True,
            required=True,
        ),
        other=Setting(
            path("OTHER"), "Second run, to compare with.", commands=(VIEW,), argument=True
        ),
        first=Setting(
            path("A"), "Baseline run.", commands=(COMPARE,), argument=True, required=True
        ),
        second=Setting(
            path("B"), "Run to evaluate.", commands=(COMPARE,), argument=True, required=True
        ),
        fail_on=Setting(
            text("PERCENT"),
            "Change for the worse that counts as a regression, as 5%; never: none.",
            "5%",
            commands=(COMPARE,),
        ),
    ),
)
