"""Settings of a server of several models."""

from __future__ import annotations

from tgi_cli.config.settings.setting import SERVE, Setting, panel
from tgi_cli.config.settings.values import SECONDS, memory, path, whole

MULTI_MODEL_SETTINGS = panel(
    "Several models",
    (SERVE,),
    models=Setting(
        path("YAML"),
        "Serve the models of this file behind one port: names, each with the settings of its "
        "model. MODEL MODEL... serves several with the same settings.",
    ),
    models_max=Setting(
        whole(0, 1024),
        "Maximum number of loaded models. 0: as many as --models-memory holds. Default: 0, or 1 "
        "on machines with GPUs, whose memory is not measured.",
        None,
    ),
    models_memory=Setting(
        memory(),
        "Memory for all loaded models. Default: 90 percent of what is available at the start.",
    ),
    model_residence_seconds=Setting(
        SECONDS,
        "Seconds that a model stays loaded before it may be unloaded for another one; at least "
        "the time that it took to load.",
        10.0,
    ),
    model_queue_size=Setting(
        whole(0, 65536), "Maximum number of requests that wait for a model to be loaded.", 256
    ),
    model_wait_seconds=Setting(
        SECONDS,
        "Longest expected wait for a model to be loaded; requests that would wait for longer get "
        "503.",
        300.0,
    ),
)
