"""Settings of ``tgi deploy``, which takes those of ``tgi serve``, too."""

from __future__ import annotations

from tgi_cli.config.settings.setting import DEPLOY, Setting, panel
from tgi_cli.config.settings.values import SWITCH, memory, number, one_of, path, text, whole

TARGETS = ("docker", "compose", "systemd", "k8s", "ray", "grafana", "prometheus")
AUTOSCALERS = ("hpa", "keda")
GATEWAYS = ("inference-pool", "smg")

DEPLOY_SETTINGS = panel(
    "Deployment",
    (DEPLOY,),
    variables=(),
    target=Setting(
        one_of("TARGET", *TARGETS),
        "What runs the server: docker, compose, systemd, k8s or ray. Or what watches it: grafana "
        "(a dashboard) or prometheus (alert rules).",
        brief="docker, compose, systemd, k8s, ray ...",
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

KUBERNETES_SETTINGS = panel(
    "Kubernetes",
    (DEPLOY,),
    variables=(),
    namespace=Setting(text("NAME"), "Namespace of all objects. Default: that of kubectl."),
    storage=Setting(memory(), "Size of the volume for models. Default: 100GiB."),
    storage_class=Setting(
        text("NAME"),
        "Storage class of the volume. For more than one pod, its volumes must be writable from "
        "several nodes (ReadWriteMany). Default: the cluster's.",
    ),
    nodes=Setting(
        whole(1, 256),
        "Nodes of one server, as a Ray cluster with replicas on all of them: a LeaderWorkerSet "
        "instead of a Deployment. The image needs the extra ray.",
        1,
    ),
    pods=Setting(
        whole(1, 4096),
        "Number of pods, or with --nodes of groups of pods; with --autoscale, the smallest number.",
        1,
    ),
    autoscale=Setting(
        one_of("BY", *AUTOSCALERS),
        "Add pods under load: by a HorizontalPodAutoscaler, whose metrics prometheus-adapter "
        "reads, or by KEDA, which asks Prometheus itself.",
    ),
    max_pods=Setting(whole(1, 4096), "Largest number of pods, with --autoscale.", 4),
    target_queue=Setting(
        whole(1),
        "Waiting requests per pod beyond which --autoscale adds pods.",
        2,
    ),
    target_token_latency=Setting(
        number(1, 1e6, "MS"),
        "Milliseconds between the tokens of a request (90th percentile) beyond which --autoscale "
        "adds pods. Default: the queue decides alone.",
    ),
    prometheus_url=Setting(
        text("URL"),
        "Prometheus that KEDA asks.",
        "http://prometheus-operated.monitoring:9090",
    ),
    gateway=Setting(
        one_of("GATEWAY", *GATEWAYS),
        "What spreads requests over the pods by their prefixes: an InferencePool of the Gateway "
        "API with its endpoint picker, or SMG. Default: the Service, at random.",
    ),
    monitoring=Setting(
        SWITCH,
        "Add objects of the Prometheus operator (PodMonitor, PrometheusRule) and the dashboard "
        "for Grafana's sidecar.",
    ),
)
