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
    OPTIONAL_SWITCH,
    SIZES,
    SWITCH,
    one_of,
    one_of_numbers,
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

INTEGERS_ON_THE_FLY = ("int8", "eetq", "bitsandbytes")
"""Formats of 8-bit integers into which ``--quantize`` quantizes unquantized weights on load."""

ON_THE_FLY = ("fp8", *INTEGERS_ON_THE_FLY, "bitsandbytes-nf4", "bitsandbytes-fp4")
"""All formats into which it does: TGI's names, and int8."""

IN_CHECKPOINTS = ("gptq", "awq", "compressed-tensors", "marlin", "exl2")
"""Formats of quantized checkpoints that ``--quantize`` may confirm."""

LOAD_FORMATS = ("auto", "stream", "dummy")

_ENGINE = (SERVE, SERVER, WARMUP)

MODEL_SETTINGS = (
    *panel(
        "Model",
        SERVING,
        model=Setting(
            text("MODEL"),
            "Model id on the Hugging Face hub, a local folder, or a URL: s3://, gs://, az://, "
            "https://. GGUF: ID:TAG, as org/name:Q4_K_M, or a file.",
            brief="Id on the hub, a folder or a GGUF file.",
            argument=True,
            alias_of="model_id",
            variables=("MODEL_ID", "HF_MODEL_ID"),
        ),
        model_id=Setting(text("MODEL"), "The same as MODEL.", variables=()),
        tokenizer_name=Setting(
            text("MODEL"),
            "The same as MODEL, by the name of TGI's router.",
            commands=(ROUTER,),
            alias_of="model_id",
        ),
        revision=Setting(
            text(),
            "Branch, tag, commit or refs/pr/N of the model.",
            commands=COMMANDS,
            variables=("REVISION", "HF_MODEL_REVISION"),
            brief="Branch, tag or commit of the model.",
        ),
        dtype=Setting(
            one_of("TYPE", "auto", "float16", "half", "bfloat16", "float32", "float"),
            "Data type of weights, activations and KV cache: auto, bfloat16, float16, float32.",
            commands=_ENGINE,
            brief="auto, bfloat16, float16 or float32.",
        ),
        trust_remote_code=Setting(
            SWITCH,
            "Run Python code that comes with the model.",
            commands=(*SERVING, QUANTIZE),
            negative=True,
            variables=("TRUST_REMOTE_CODE", "HF_MODEL_TRUST_REMOTE_CODE"),
            brief="Run Python code that comes with the model.",
        ),
        config=Setting(
            path("YAML"),
            "Read settings from this file. Flags and environment variables override it.",
            commands=COMMANDS,
            variables=("TGI_CONFIG",),
            brief="Read settings from this file.",
        ),
    ),
)

LOADING_SETTINGS = (
    *panel(
        "Loading",
        _ENGINE,
        quantize=Setting(
            one_of("METHOD", *IN_CHECKPOINTS, *ON_THE_FLY),
            "Quantize unquantized weights on load: int8, eetq, bitsandbytes (8 bits), "
            "bitsandbytes-nf4, bitsandbytes-fp4, fp8. The format of a quantized checkpoint (gptq, "
            "awq, compressed-tensors, ...) is detected; the flag only confirms it.",
            variables=("QUANTIZE", "HF_MODEL_QUANTIZE"),
            brief="Quantize on load, as int8 or fp8.",
        ),
        quantize_head=Setting(
            SWITCH,
            "Quantize the output head to int8 with a scale per row, whatever the format of the "
            "other weights. Embeddings are not quantized.",
        ),
        quantize_head_bits=Setting(
            one_of_numbers(4, 8),
            "Quantize the output head like --quantize-head, to 8 bits (int8) or to 4 (nf4 with a "
            "scale per 64 inputs). Default: 8, with --quantize-head alone.",
        ),
        quantize_activations=Setting(
            OPTIONAL_SWITCH,
            "Round activations to int8, with a scale per 64 inputs or fewer, for products with "
            "weights in integers of 8 bits or fewer: faster, less accurate. Needs bfloat16 and our "
            "kernels, for AVX2 or for AVX-512 with VNNI. Default: on where these are, else off.",
            negative=True,
        ),
        load_format=Setting(
            one_of("FORMAT", *LOAD_FORMATS),
            "auto: load the checkpoint's weights; stream: read those of a model behind a URL "
            "(s3://, gs://, az://, https://) into memory, without a copy on the disk; dummy: "
            "random weights of the same shapes, from config.json alone, for benchmarks.",
            "auto",
        ),
        cross_check=Setting(
            SWITCH,
            "Compare greedy tokens with those of transformers before serving. Takes the memory of "
            "a second copy of the model meanwhile.",
        ),
        rope_scaling=Setting(
            one_of("KIND", "linear", "dynamic"),
            "RoPE scaling, which extends the model's context by --rope-factor: linear or dynamic "
            "(NTK, for the served context).",
        ),
        rope_factor=Setting(
            FACTOR, "RoPE scaling factor; without --rope-scaling, linear. Default: 1."
        ),
        model_gguf=Setting(
            text("FILE"),
            "GGUF file with the weights, or ID:TAG on the hub. MODEL, if given, then names the "
            "tokenizer.",
            commands=(*_ENGINE, DOWNLOAD),
        ),
        tokenizer_name=Setting(
            text("MODEL"),
            "Model id or folder whose tokenizer replaces that of a GGUF file.",
            commands=(*_ENGINE, DOWNLOAD),
        ),
        disable_custom_kernels=Setting(
            SWITCH,
            "Use PyTorch operations only, no custom C++ or Triton kernels. Several times slower.",
        ),
        huggingface_hub_cache=Setting(
            path("FOLDER"),
            "Hugging Face hub cache, overriding HF_HUB_CACHE.",
            commands=SERVING,
            inherited=True,
        ),
        weights_cache_override=Setting(
            path("FOLDER"),
            "Load the safetensors files of this folder; only the configuration and the tokenizer "
            "are downloaded.",
            inherited=True,
        ),
        model_path=Setting(
            path(),
            "Folder of the model, if already resolved.",
            commands=(SERVER, ROUTER),
            hidden=True,
            variables=(),
        ),
        url=Setting(
            text("URL"),
            "Warm up a running server instead.",
            commands=(WARMUP,),
            variables=(),
            brief="Warm up a running server instead.",
        ),
        batch_sizes=Setting(
            SIZES,
            "Batch sizes, as 1,2,4.",
            commands=(WARMUP,),
            variables=(),
            brief="Batch sizes to time, as 1,2,4.",
        ),
    ),
    *panel(
        "Download",
        (DOWNLOAD,),
        variables=(),
        extension=Setting(text("SUFFIX"), "File suffix of weights.", ".safetensors"),
        auto_convert=Setting(SWITCH, "Convert .bin weights to safetensors.", True, negative=True),
        merge_lora=Setting(SWITCH, "Merge a PEFT adapter into its base model.", negative=True),
        quiet=Setting(SWITCH, "Show warnings and errors only, no progress."),
    ),
    *panel(
        "LoRA adapters",
        _ENGINE,
        lora_adapters=Setting(
            ITEMS,
            "LoRA adapters that requests may use, comma-separated: id, id@revision or name=path.",
            (),
            brief="LoRA adapters that requests may use.",
        ),
        max_loras=Setting(
            whole(1, 1024),
            "LoRA adapters on the device, and thus in one batch. Setting it enables loading "
            f"adapters over HTTP. Default: {DEFAULT_LORAS} with --lora-adapters, else 0.",
        ),
        max_cpu_loras=Setting(
            whole(1),
            "LoRA adapters cached in CPU memory; others are read again on use. Default: "
            f"{DEFAULT_CPU_LORAS}.",
        ),
        max_lora_rank=Setting(
            whole(1, 16384),
            f"Maximum LoRA rank. Default: that of the named adapters, at least {MIN_LORA_RANK}; "
            f"without any, {DEFAULT_LORA_RANK}.",
        ),
    ),
)
