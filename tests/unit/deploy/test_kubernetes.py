"""Manifests against the published schemas, and that their objects find each other."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.tools.server_process import poll
from tests.unit.deploy.custom_resources import SCHEMAS
from tests.unit.deploy.test_files import PLAIN
from tgi_cli.deploy.deployment import Deployment
from tgi_cli.deploy.kubernetes import render
from tgi_cli.deploy.kubernetes.options import KubernetesOptions
from tgi_cli.errors import ConfigError

VERSION = "1.37"
GPU = replace(PLAIN, name="chat", gpus=1, memory=None)
EVERYTHING = KubernetesOptions(
    namespace="llm",
    storage_class="shared",
    pods=2,
    max_pods=8,
    target_token_seconds=0.1,
    prometheus_url="http://prometheus:9090",
    monitoring=True,
    adapters=True,
)


@functools.cache
def objects(deployment: Deployment, options: KubernetesOptions) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(render(deployment, options)))


def one(found: list[dict[str, Any]], kind: str, name: str = "chat") -> dict[str, Any]:
    (match,) = [each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return match


def validate(manifest: dict[str, Any]) -> None:
    schema = SCHEMAS.get(manifest["kind"])
    if schema is None:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
        return
    jsonschema.Draft202012Validator(schema).validate(manifest)
    if manifest["kind"] == "LeaderWorkerSet":
        for role in ("leaderTemplate", "workerTemplate"):
            template = manifest["spec"]["leaderWorkerTemplate"][role]
            spec = {
                "selector": {"matchLabels": template["metadata"]["labels"]},
                "template": template,
            }
            owner = {"apiVersion": "apps/v1", "kind": "Deployment", "spec": spec}
            kubernetes_validate.validate(owner, VERSION, strict=True)


def variants() -> Iterator[KubernetesOptions]:
    for autoscaler, gateway in itertools.zip_longest(("hpa", "keda"), ("inference-pool", "smg")):
        yield replace(EVERYTHING, autoscaler=autoscaler, gateway=gateway)
    yield replace(EVERYTHING, nodes=3, autoscaler="keda", gateway="smg")


def test_every_manifest_is_valid() -> None:
    checked = set()
    for manifest in [
        *(each for options in variants() for each in objects(GPU, options)),
        *objects(PLAIN, KubernetesOptions()),
    ]:
        text = json.dumps(manifest)
        if text not in checked:
            validate(manifest)
        checked.add(text)
    assert {"HorizontalPodAutoscaler", "PodDisruptionBudget", *SCHEMAS} <= {
        json.loads(each)["kind"] for each in checked
    }


def test_the_validator_finds_faults() -> None:
    manifest = copy.deepcopy(one(objects(GPU, EVERYTHING), "Deployment"))
    manifest["spec"]["template"]["spec"]["containers"][0]["livenes"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(manifest)
    found = objects(GPU, replace(EVERYTHING, gateway="inference-pool"))
    pool = copy.deepcopy(one(found, "InferencePool"))
    pool["spec"]["extensionRef"] = pool["spec"].pop("endpointPickerRef")
    with pytest.raises(jsonschema.ValidationError):
        validate(pool)


def test_objects_have_names_of_their_own() -> None:
    for options in variants():
        names = [(each["kind"], each["metadata"]["name"]) for each in objects(GPU, options)]
        assert len(names) == len(set(names))
        for each in objects(GPU, options):
            assert each["metadata"]["namespace"] == "llm"


def test_one_pod_owns_its_volume_and_several_share_it() -> None:
    found = objects(GPU, KubernetesOptions())
    assert one(found, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert one(found, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert "PodDisruptionBudget" not in {each["kind"] for each in found}
    found = objects(GPU, EVERYTHING)
    claim = one(found, "PersistentVolumeClaim")["spec"]
    assert (claim["accessModes"], claim["storageClassName"]) == (["ReadWriteMany"], "shared")
    spec = one(found, "Deployment")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    matched = one(found, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    assert matched == spec["template"]["metadata"]["labels"]


def test_an_autoscaler_alone_sets_the_number_of_pods() -> None:
    found = objects(GPU, replace(EVERYTHING, autoscaler="hpa"))
    assert "replicas" not in one(found, "Deployment")["spec"]
    spec = one(found, "HorizontalPodAutoscaler")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 8)
    assert spec["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "chat",
    }
    targets = {each["pods"]["metric"]["name"]: each["pods"]["target"] for each in spec["metrics"]}
    assert targets == {
        "tgi_queue_size": {"type": "AverageValue", "averageValue": "2"},
        "tgi_inter_token_p90_seconds": {"type": "AverageValue", "averageValue": "100m"},
    }
    config = yaml.safe_load(one(found, "ConfigMap", "chat-adapter-rules")["data"]["config.yaml"])
    assert {rule["name"]["as"] for rule in config["rules"]} == set(targets)


def test_keda_asks_for_this_deployment_alone() -> None:
    spec = one(objects(GPU, replace(EVERYTHING, autoscaler="keda")), "ScaledObject")["spec"]
    queue, latency = spec["triggers"]
    assert (queue["metricType"], queue["metadata"]["threshold"]) == ("AverageValue", "2")
    assert (latency["metricType"], latency["metadata"]["threshold"]) == ("Value", "0.1")
    for trigger in (queue, latency):
        assert trigger["metadata"]["serverAddress"] == "http://prometheus:9090"
        assert 'app_kubernetes_io_instance="chat",namespace="llm"' in trigger["metadata"]["query"]


def test_the_queue_decides_alone_without_a_target_of_latency() -> None:
    options = replace(EVERYTHING, target_token_seconds=None)
    found = objects(GPU, replace(options, autoscaler="hpa"))
    assert len(one(found, "HorizontalPodAutoscaler")["spec"]["metrics"]) == 1
    found = objects(GPU, replace(options, autoscaler="keda"))
    assert len(one(found, "ScaledObject")["spec"]["triggers"]) == 1


def test_an_inference_pool_finds_pods_and_picker() -> None:
    found = objects(GPU, replace(EVERYTHING, gateway="inference-pool"))
    pool = one(found, "InferencePool")["spec"]
    template = one(found, "Deployment")["spec"]["template"]
    assert pool["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert pool["targetPorts"] == [{"number": 3000}]
    picker = one(found, "Deployment", "chat-epp")["spec"]["template"]
    service = one(found, "Service", pool["endpointPickerRef"]["name"])["spec"]
    assert service["selector"] == picker["metadata"]["labels"] != template["metadata"]["labels"]
    assert pool["endpointPickerRef"]["port"]["number"] in {
        each["port"] for each in service["ports"]
    }
    backend = one(found, "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "chat")
    config = yaml.safe_load(one(found, "ConfigMap", "chat-epp")["data"]["config.yaml"])
    used = {each["pluginRef"] for each in config["schedulingProfiles"][0]["plugins"]}
    assert used <= {each["type"] for each in config["plugins"]}
    assert "lora-affinity-scorer" in used


def test_smg_discovers_the_pods() -> None:
    found = objects(GPU, replace(EVERYTHING, gateway="smg"))
    spec = one(found, "Deployment", "chat-gateway")["spec"]["template"]["spec"]
    arguments = spec["containers"][0]["args"]
    start = arguments.index("--selector") + 1
    labels = one(found, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert arguments[start : start + 2] == [f"{key}={value}" for key, value in labels.items()]
    assert "--service-discovery-namespace=llm" in arguments
    assert "--api-key=$(GATEWAY_KEY)" in arguments
    (subject,) = one(found, "RoleBinding", "chat-gateway")["subjects"]
    assert (subject["name"], subject["namespace"]) == (spec["serviceAccountName"], "llm")
    text = render(GPU, replace(EVERYTHING, gateway="smg"))
    assert '--from-literal=gateway-key="$(head -n 1 /etc/tgi/api-key)"' in text
    text = render(replace(GPU, api_key_file=None), replace(EVERYTHING, gateway="smg"))
    assert "GATEWAY_KEY" not in text


def test_a_group_of_pods_is_a_ray_cluster() -> None:
    found = objects(PLAIN, KubernetesOptions(nodes=3))
    group = one(found, "LeaderWorkerSet", "tgi")["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 3
    (leader,) = group["leaderTemplate"]["spec"]["containers"]
    (worker,) = group["workerTemplate"]["spec"]["containers"]
    assert leader["args"] == [
        *PLAIN.arguments,
        *("--distributed=ray", "--ray-address=auto", "--replicas=3", "--replica-cpus=4"),
    ]
    assert "readinessProbe" in leader
    assert "readinessProbe" not in worker
    for container in (leader, worker):
        assert "ray start" in container["command"][2]
        assert "--num-cpus=4 --num-gpus=0" in container["command"][2]
        names = {each["name"]: each for each in container["env"]}
        assert names["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "ray-token"
        assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/tmp", "/dev/shm"}
    selector = one(found, "Service", "tgi")["spec"]["selector"]
    assert group["leaderTemplate"]["metadata"]["labels"] == selector
    assert group["workerTemplate"]["metadata"]["labels"] != selector
    modes = one(found, "PersistentVolumeClaim", "tgi")["spec"]["accessModes"]
    assert modes == ["ReadWriteMany"]
    text = render(replace(PLAIN, api_key_file=None), KubernetesOptions(nodes=3))
    assert 'create secret generic tgi --from-literal=ray-token="$(openssl rand -hex 32)"' in text


def test_the_stages_of_a_replica_are_on_the_nodes_of_a_group() -> None:
    found = objects(PLAIN, KubernetesOptions(nodes=4, stages=2))
    group = one(found, "LeaderWorkerSet", "tgi")["spec"]["leaderWorkerTemplate"]
    (leader,) = group["leaderTemplate"]["spec"]["containers"]
    assert "--replicas=2" in leader["args"]


def test_a_disruption_budget_counts_all_pods_of_groups() -> None:
    found = objects(GPU, replace(EVERYTHING, nodes=3))
    spec = one(found, "PodDisruptionBudget")["spec"]
    (named,) = spec["selector"]["matchExpressions"]
    group = one(found, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    for role in ("leaderTemplate", "workerTemplate"):
        labels = group[role]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert labels[named["key"]] in named["values"]
    gateway = one(
        objects(GPU, replace(EVERYTHING, nodes=3, gateway="smg")), "Service", "chat-gateway"
    )
    assert gateway["spec"]["selector"][named["key"]] not in named["values"]


def worker_container(port: int = 3000) -> dict[str, Any]:
    found = objects(replace(PLAIN, port=port), KubernetesOptions(nodes=2))
    group = one(found, "LeaderWorkerSet", "tgi")["spec"]["leaderWorkerTemplate"]
    container: dict[str, Any] = group["workerTemplate"]["spec"]["containers"][0]
    return container


def test_a_worker_joins_again_and_leaves_at_a_signal(tmp_path: Path) -> None:
    """Its shell is the container's first process, which gets the only signal."""
    ray = tmp_path / "ray"
    ray.write_text(
        "#!/bin/sh\n"
        f"echo start >> {tmp_path}/log\n"
        f"[ $(grep -c start {tmp_path}/log) = 2 ] || exit 1\n"  # the leader is not there yet
        f"trap 'echo left >> {tmp_path}/log; exit 0' TERM\n"
        f"echo joined >> {tmp_path}/log\n"
        "while :; do sleep 0.05; done\n"
    )
    ray.chmod(0o755)
    (tmp_path / "log").touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LWS_LEADER_ADDRESS": "leader"}
    worker = subprocess.Popen(worker_container()["command"], env=environment)
    try:
        poll(lambda: "joined" in (tmp_path / "log").read_text(), 60, "it joins")
        worker.terminate()
        assert worker.wait(60) == 143
    finally:
        worker.kill()
        worker.wait()
    assert (tmp_path / "log").read_text().split() == ["start", "start", "joined", "left"]


def test_a_worker_waits_for_its_leaders_last_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as leader:
        leader.settimeout(60)
        hook = worker_container(leader.getsockname()[1])["lifecycle"]["preStop"]["exec"]["command"]
        environment = os.environ | {"LWS_LEADER_ADDRESS": "127.0.0.1"}
        waiting = subprocess.Popen([sys.executable, *hook[1:]], env=environment)
        for _ in range(3):
            leader.accept()[0].close()
        assert waiting.poll() is None
    assert waiting.wait(60) == 0


def test_arguments_do_not_reach_a_leaders_shell() -> None:
    hostile = replace(PLAIN, arguments=("serve", "$(touch /tmp/x)", "`id`; exit"))
    found = objects(hostile, KubernetesOptions(nodes=2))
    group = one(found, "LeaderWorkerSet", "tgi")["spec"]["leaderWorkerTemplate"]
    (leader,) = group["leaderTemplate"]["spec"]["containers"]
    assert leader["command"][2].endswith('exec tgi "$@"')
    assert leader["args"][1:3] == ["$$(touch /tmp/x)", "`id`; exit"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"autoscaler": "hpa", "pods": 4}, "--max-pods"),
        ({"gateway": "smg"}, "--namespace"),
        ({"gateway": "inference-pool", "namespace": "a", "replicas": 2}, "--pods"),
        ({"gateway": "inference-pool", "namespace": "a", "nodes": 2}, "--pods"),
        ({"namespace": "a b"}, "--namespace"),
        ({"storage_class": "--x"}, "--storage-class"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KubernetesOptions(**fields)
    assert message in f"{caught.value.cause} {caught.value.remedy}"
