"""Settings of ``tgi deploy``, which takes those of ``tgi serve``, too."""

from __future__ import annotations

from tgi_cli.config.settings.setting import DEPLOY, Setting, panel
from tgi_cli.config.settings.values import SWITCH, memory, one_of, path, text, whole

TARGETS = ("docker", "compose", "systemd", "k8s", "ray")

DEPLOY_SETTINGS = panel(
    "Deployment",
    (DEPLOY,),
    variables=(),
    target=Setting(
        one_of("TARGET", *TARGETS),
        "What runs the server: docker, compose, systemd, k8s or ray (which is started).",
        argument=True,
        required=True,
    ),
    output=Setting(
        path("FILE"),
        "Write to this file instead of printing it.",
        short="o",
        brief="Write to this file.",
    ),
    force=Setting(SWITCH, "Replace the file if it exists."),
    name=Setting(
        text("NAME"), "Name of the container, the service or the Kubernetes objects.", "tgi"
    ),
    image=Setting(
        text("IMAGE"),
        "Image of the container, built from docs/Dockerfile. Default: tgi-cli:VERSION.",
    ),
    memory=Setting(
        memory(),
        "Memory limit, as 16GiB. Default on a CPU: weights, steps and cache as measured on this "
        "machine, which a server would take here.",
        brief="Memory limit, as 16GiB.",
    ),
    cpus=Setting(whole(1, 4096), "Limit of cores. Default: those of this machine."),
    cpuset_cpus=Setting(
        text("LIST"), "Cores to bind the server to, as 0-7 (docker, compose, systemd)."
    ),
    cpuset_mems=Setting(text("LIST"), "NUMA nodes to take memory from, as 0 (docker, systemd)."),
    gpus=Setting(whole(0, 64), "NVIDIA GPUs to give to the server.", 0, brief="NVIDIA GPUs."),
    storage=Setting(memory(), "Size of the volume for models (k8s). Default: 100GiB."),
    keys=Setting(
        SWITCH,
        "Require API keys, which the server reads from a secret: the file --api-key-file, by "
        "default /etc/NAME/api-key.",
        True,
        negative=True,
    ),
    hf_token_file=Setting(
        path("FILE"), "File with a token of the Hugging Face hub, for gated models."
    ),
)
