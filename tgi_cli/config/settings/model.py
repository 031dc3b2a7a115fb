"""Settings of the model: which one, how its weights are loaded, its adapters."""

from __future__ import annotations

from tgi_cli.config.settings.setting import (
    COMMANDS,
    DOWNLOAD,
    QUANTIZE,
    ROUTER,
    SERVE,
    SERVER,
    SERVING,
    WARMUP,
    Setting,
    panel,
)
from tgi_cli.config.settings.values import (
    FACTOR,
    ITEMS,
    SIZES,
    SWITCH,
    one_of,
    path,
    text,
    whole,
)

DEFAULT_LORAS = 4
"""Default number of adapter slots, if any adapter is named."""

DEFAULT_CPU_LORAS = 32
"""Default number of adapters cached in CPU memory."""

DEFAULT_LORA_RANK = 64
"""Default rank of adapter slots, if no adapter is named."""

MIN_LORA_RANK = 16
"""Minimum rank of adapter slots by default."""

ON_THE_FLY = ("fp8", "int8", "eetq", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4")
"""Formats into which ``--quantize`` quantizes unquantized weights on load: TGI's names, and
int8."""

IN_CHECKPOINTS = ("gptq", "awq", "compressed-tensors", "marlin", "exl2")
"""Formats of quantized checkpoints that ``--quantize`` may confirm."""

LOAD_FORMATS = ("auto", "dummy")

_ENGINE = (SERVE, SERVER, WARMUP)

MODEL_SETTINGS = (
    *panel(
        "Model",
        SERVING,
        Setting(
            "model",
            text("MODEL"),
            None,
            "Model id on the Hugging Face hub, or a local folder.",
            argument=True,
            alias_of="model_id",
            variables=("MODEL_ID", "HF_MODEL_ID"),
        ),
        Setting("model_id", text(), None, "The same as MODEL.", variables=()),
        Setting(
            "tokenizer_name",
            text(),
            None,
            "The same as MODEL, by the name of TGI's router.",
            (ROUTER,),
            alias_of="model_id",
        ),
        Setting(
            "revision",
            text(),
            None,
            "Branch, tag, commit or refs/pr/N of the model.",
            COMMANDS,
            variables=("REVISION", "HF_MODEL_REVISION"),
        ),
        Setting(
            "dtype",
            one_of("TYPE", "auto", "float16", "half", "bfloat16", "float32", "float"),
            None,
            "Data type of weights, activations and KV cache: auto, bfloat16, float16, float32.",
            _ENGINE,
        ),
        Setting(
            "trust_remote_code",
            SWITCH,
            False,
            "Run Python code that comes with the model.",
            (*SERVING, QUANTIZE),
            negative=True,
            variables=("TRUST_REMOTE_CODE", "HF_MODEL_TRUST_REMOTE_CODE"),
        ),
        Setting(
            "config",
            path("YAML"),
            None,
            "Read settings from this file. Flags and environment variables override it.",
            COMMANDS,
            variables=("TGI_CONFIG",),
        ),
    ),
)

LOADING_SETTINGS = (
    *panel(
        "Loading",
        _ENGINE,
        Setting(
            "quantize",
            one_of("METHOD", *IN_CHECKPOINTS[:4], *ON_THE_FLY, "exl2"),
            None,
            "Quantize unquantized weights on load: int8, eetq, bitsandbytes (8 bits), "
            "bitsandbytes-nf4, bitsandbytes-fp4, fp8. The format of a quantized checkpoint (gptq, "
            "awq, compressed-tensors, ...) is detected; the flag only confirms it.",
            variables=("QUANTIZE", "HF_MODEL_QUANTIZE"),
        ),
        Setting(
            "quantize_head",
            SWITCH,
            False,
            "Quantize the output head to int8 with a scale per row, whatever the format of the "
            "other weights. Embeddings are not quantized.",
        ),
        Setting(
            "load_format",
            one_of("FORMAT", *LOAD_FORMATS),
            "auto",
            "auto: load the checkpoint's weights; dummy: random weights of the same shapes, from "
            "config.json alone, for benchmarks.",
        ),
        Setting(
            "cross_check",
            SWITCH,
            False,
            "Compare greedy tokens with those of transformers before serving. Takes the memory of "
            "a second copy of the model meanwhile.",
        ),
        Setting(
            "rope_scaling",
            one_of("KIND", "linear", "dynamic"),
            None,
            "RoPE scaling, which extends the model's context by --rope-factor: linear or dynamic "
            "(NTK, for the served context).",
        ),
        Setting(
            "rope_factor",
            FACTOR,
            None,
            "RoPE scaling factor; without --rope-scaling, linear. Default: 1.",
        ),
        Setting(
            "disable_custom_kernels",
            SWITCH,
            False,
            "Use PyTorch operations only, no custom C++ or Triton kernels. Several times slower.",
        ),
        Setting(
            "huggingface_hub_cache",
            path("FOLDER"),
            None,
            "Hugging Face hub cache, overriding HF_HUB_CACHE.",
            SERVING,
            inherited=True,
        ),
        Setting(
            "weights_cache_override",
            path("FOLDER"),
            None,
            "Load the safetensors files of this folder; only the configuration and the tokenizer "
            "are downloaded.",
            inherited=True,
        ),
        Setting(
            "model_path",
            path(),
            None,
            "Folder of the model, if already resolved.",
            (SERVER, ROUTER),
            hidden=True,
            variables=(),
        ),
        Setting(
            "url", text("URL"), None, "Warm up a running server instead.", (WARMUP,), variables=()
        ),
        Setting("batch_sizes", SIZES, None, "Batch sizes, as 1,2,4.", (WARMUP,), variables=()),
    ),
    *panel(
        "Download",
        (DOWNLOAD,),
        Setting("extension", text("SUFFIX"), ".safetensors", "File suffix of weights."),
        Setting(
            "auto_convert", SWITCH, True, "Convert .bin weights to safetensors.", negative=True
        ),
        Setting(
            "merge_lora", SWITCH, False, "Merge a PEFT adapter into its base model.", negative=True
        ),
        Setting("quiet", SWITCH, False, "Show warnings and errors only, no progress."),
        variables=(),
    ),
    *panel(
        "LoRA adapters",
        _ENGINE,
        Setting(
            "lora_adapters",
            ITEMS,
            (),
            "LoRA adapters that requests may use, comma-separated: id, id@revision or name=path.",
        ),
        Setting(
            "max_loras",
            whole(1, 1024),
            None,
            "LoRA adapters on the device, and thus in one batch. Setting it enables loading "
            f"adapters over HTTP. Default: {DEFAULT_LORAS} with --lora-adapters, else 0.",
        ),
        Setting(
            "max_cpu_loras",
            whole(1),
            None,
            "LoRA adapters cached in CPU memory; others are read again on use. Default: "
            f"{DEFAULT_CPU_LORAS}.",
        ),
        Setting(
            "max_lora_rank",
            whole(1, 16384),
            None,
            f"Maximum LoRA rank. Default: that of the named adapters, at least {MIN_LORA_RANK}; "
            f"without any, {DEFAULT_LORA_RANK}.",
        ),
    ),
)
