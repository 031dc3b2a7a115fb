"""Settings of where the model runs: devices, sockets, adapters beside it."""

from __future__ import annotations

from tgi_cli.config.settings.setting import (
    ADAPTERS,
    DEVICES,
    LOADING,
    ROUTER,
    SERVE,
    SERVER,
    WARMUP,
    Setting,
)
from tgi_cli.config.settings.values import ITEMS, SWITCH, path, whole

_ENGINE = (SERVE, SERVER, WARMUP)
_SHARDS = (SERVE, SERVER)

DEVICE_SETTINGS = (
    Setting(
        "sharded",
        SWITCH,
        None,
        "Spread the model over all devices that are there, or over one alone.",
        DEVICES,
        _ENGINE,
        negative=True,
    ),
    Setting(
        "num_shard",
        whole(1, 256),
        None,
        "Processes that share the model, one device each. Left open: the GPUs that "
        "CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES names, else 1; with --sharded all.",
        DEVICES,
        _ENGINE,
        variables=("NUM_SHARD", "SM_NUM_GPUS"),
    ),
    Setting(
        "lora_adapters",
        ITEMS,
        (),
        "LoRA adapters that requests may name: id, id@revision or name=path, with commas "
        "between them.",
        ADAPTERS,
        _ENGINE,
    ),
    Setting(
        "max_loras",
        whole(1, 1024),
        None,
        "Adapters on the device at once: so many different ones share a batch. Giving it "
        "allows adapters to be loaded over HTTP. Left open: 4 where adapters are named, else 0.",
        ADAPTERS,
        _ENGINE,
    ),
    Setting(
        "max_cpu_loras",
        whole(1),
        None,
        "Adapters kept in the host's memory; others are read again when they are asked "
        "for. Left open: 32.",
        ADAPTERS,
        _ENGINE,
    ),
    Setting(
        "max_lora_rank",
        whole(1, 16384),
        None,
        "The largest rank an adapter may have. Left open: that of the adapters named, at "
        "least 16; 64 where none is named.",
        ADAPTERS,
        _ENGINE,
    ),
    Setting(
        "uds_path",
        path(),
        None,
        "The unix socket to listen on, in a folder that only you may enter. Left open: "
        "tgi/engine.sock in XDG_RUNTIME_DIR.",
        DEVICES,
        (SERVER,),
        variables=(),
    ),
    Setting(
        "shard_uds_path",
        path("PREFIX"),
        None,
        "Listen on PREFIX-0 too, where TGI's own clients look for a shard (generate.v2, "
        "generate.v3).",
        DEVICES,
        _SHARDS,
    ),
    Setting(
        "model_path",
        path(),
        None,
        "The model's folder, when it is known already.",
        LOADING,
        (SERVER, ROUTER),
        hidden=True,
        variables=(),
    ),
    Setting(
        "config_fd",
        whole(0),
        None,
        "The configuration of a child of `tgi serve`.",
        LOADING,
        (SERVER, ROUTER),
        hidden=True,
        variables=(),
    ),
)
