"""The panels of the dashboard about engines, replicas and processes."""

from __future__ import annotations

from tgi_cli.deploy.monitoring.panel import (
    BYTES,
    COUNT,
    REQUESTS,
    SECONDS,
    SHARE,
    STEPS,
    TOKENS,
    Panel,
    PanelRow,
)
from tgi_cli.deploy.monitoring.queries import (
    increase,
    mean,
    quantile,
    quantiles,
    rate,
    series,
    total,
)

_ACCEPTED = rate("tgi_draft_accepted_tokens_total")

ENGINE_PANELS = PanelRow(
    "Engine",
    (
        Panel(
            title="Tokens",
            unit=TOKENS,
            queries={
                "prompts": rate("tgi_engine_prompt_tokens_total"),
                "generated": rate("tgi_request_generated_tokens_sum"),
            },
            description="Prompt tokens are those that were computed, without cached ones. "
            "Generated tokens are counted when their request ends.",
        ),
        Panel(
            title="Steps",
            unit=STEPS,
            queries={"{{method}}": rate("tgi_batch_inference_count", "method")},
            stacked=True,
            description="A step that computes prompts is a prefill, with or without decodes.",
        ),
        Panel(
            title="Failed steps",
            unit=STEPS,
            queries={"{{method}}": rate("tgi_batch_inference_failure", "method")},
        ),
        *(
            Panel(
                title=f"{title} of a {method} step (p50)",
                unit=SECONDS,
                queries={
                    stage: quantile(0.5, f"tgi_batch_{name}_duration", method=method)
                    for stage, name in stages
                },
            )
            for method in ("prefill", "decode")
            for title, stages in (
                ("Stages", (("total", "inference"), ("device", "forward"))),
                ("Host stages", (("processing", "decode"), ("sending", "filter"))),
            )
        ),
        Panel(
            title="Scheduling of joins",
            unit=SECONDS,
            queries=quantiles("tgi_batch_concat_duration"),
        ),
    ),
)

CACHE_PANELS = PanelRow(
    "KV cache",
    (
        Panel(
            title="Use",
            unit=SHARE,
            queries={"{{instance}} {{replica}}": series("tgi_kv_cache_usage_ratio")},
            thresholds=(0.9, 0.99),
            top=1,
        ),
        Panel(
            title="Tokens in blocks",
            unit=COUNT,
            queries={
                "in use": total("tgi_batch_current_max_tokens"),
                "capacity": total("tgi_batch_max_total_tokens"),
            },
        ),
        Panel(
            title="Preemptions",
            unit=REQUESTS,
            queries={"{{instance}}": rate("tgi_preemptions_total", "instance")},
            thresholds=(0.01, 0.1),
            description="Requests whose blocks others needed, and which are computed again.",
        ),
        Panel(
            title="Prefix hits",
            unit=SHARE,
            queries={
                "{{instance}}": f"{rate('tgi_prefix_cache_hit_tokens_total', 'instance')}"
                f" / {rate('tgi_prefix_cache_query_tokens_total', 'instance')}"
            },
            top=1,
            description="Share of prompt tokens that were cached.",
        ),
        Panel(
            title="Cached prompt tokens",
            unit=TOKENS,
            queries={"cached": rate("tgi_request_cached_tokens_total")},
        ),
        Panel(
            title="KV blocks on a disk",
            unit="suffix: blocks/s",
            queries={"{{event}}": rate("tgi_kv_cache_dir_blocks_total", "event")},
            description="Only with --kv-cache-dir. hit: read instead of computed. miss: not there. "
            "skipped: there, but computed faster.",
        ),
        Panel(
            title="Size of the folder of KV blocks",
            unit=BYTES,
            queries={"{{instance}}": f"max by (instance) ({series('tgi_kv_cache_dir_bytes')})"},
            description="Only with --kv-cache-dir.",
        ),
        Panel(
            title="Reusable content",
            unit=COUNT,
            queries={
                "blocks": total("tgi_prefix_cache_blocks"),
                "recurrent states": total("tgi_prefix_cache_states"),
            },
        ),
    ),
)

SPECULATION_PANELS = PanelRow(
    "Speculation and images",
    (
        Panel(
            title="Accepted drafts",
            unit=SHARE,
            queries={
                "all": f"{_ACCEPTED} / {rate('tgi_draft_tokens_total')}",
                "{{source}}": f"{rate('tgi_draft_accepted_tokens_by_source_total', 'source')}"
                f" / {rate('tgi_draft_tokens_by_source_total', 'source')}",
            },
            top=1,
            description="Share of draft tokens that the model agreed to.",
        ),
        Panel(
            title="Tokens per step beyond the first (mean)",
            unit=COUNT,
            queries={"tokens": mean("tgi_request_skipped_tokens")},
            description="Accepted drafts, and tokens that a grammar leaves no alternative to.",
        ),
        Panel(
            title="Images",
            unit="suffix: images/s",
            queries={
                "encoded": rate("tgi_images_encoded_total"),
                "reused": rate("tgi_images_reused_total"),
            },
            stacked=True,
        ),
    ),
)

REPLICA_PANELS = PanelRow(
    "Replicas, sleep and processes",
    (
        Panel(
            title="Replicas that get requests",
            unit=COUNT,
            queries={"{{instance}}": total("tgi_replica_up", "instance")},
            description="Only with --replicas.",
        ),
        Panel(
            title="Requests by replica",
            unit=REQUESTS,
            queries={
                "{{instance}} {{replica}}": rate(
                    "tgi_replica_requests_total", "instance", "replica"
                )
            },
            stacked=True,
        ),
        Panel(
            title="Why a replica was chosen",
            unit=REQUESTS,
            queries={"{{reason}}": rate("tgi_replica_requests_total", "reason")},
            stacked=True,
        ),
        Panel(
            title="Asleep",
            unit=COUNT,
            queries={"{{instance}}": total("tgi_engine_asleep", "instance")},
            top=1,
        ),
        Panel(
            title="Wakes",
            unit=COUNT,
            queries={"{{result}}": increase("tgi_engine_wakes_total", "result")},
        ),
        Panel(
            title="Last wake",
            unit=SECONDS,
            queries={"{{instance}}": total("tgi_engine_last_wake_seconds", "instance")},
        ),
        Panel(
            title="LoRA adapters",
            unit=COUNT,
            queries={
                "{{instance}}": f"max by (instance) ({series('tgi_lora_adapters')})",
            },
        ),
        Panel(
            title="Router: CPU",
            unit=SHARE,
            queries={"{{instance}}": rate("process_cpu_seconds_total", "instance")},
            description="One core is 100 %.",
        ),
        Panel(
            title="Router: memory",
            unit=BYTES,
            queries={"{{instance}}": total("process_resident_memory_bytes", "instance")},
        ),
    ),
)
