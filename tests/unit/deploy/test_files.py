"""The files of `tgi deploy`: what they limit, and that no argument can break out of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tgi_cli.deploy import compose, docker, kubernetes, systemd
from tgi_cli.deploy.deployment import Deployment, existing_paths, printable, with_link_targets
from tgi_cli.errors import ConfigError

TGI = Path("/opt/tgi/bin/tgi")
PLAIN = Deployment(
    arguments=("serve", "org/model", "--port=3000"),
    name="tgi",
    image="tgi-cli:0.1.0",
    port=3000,
    hostname="0.0.0.0",
    drain_seconds=90,
    memory=3 << 30,
    cpus=4,
    storage=100 << 30,
    api_key_file=Path("/etc/tgi/api-key"),
    notes=("Memory: enough.",),
)
HOSTILE = (
    "--rm",
    "a b",
    'it\'s "quoted"',
    "$(touch /tmp/x)",
    "`id`; exit",
    "${HOME} $HOME $$ %h %%",
    "a\nb: c\n  - d",
    "\r\n[Service]\nUser=root",
    "# no comment",
    "back\\slash \\n \\",
    "{a: b}",
    "\u2028\x85é",
    "---",
    ";",
    "null",
)

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


def compose_file(deployment: Deployment) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(compose.render(deployment))
    return document


def manifests(deployment: Deployment) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(kubernetes.render(deployment))}


def pod(deployment: Deployment) -> dict[str, Any]:
    found: dict[str, Any] = manifests(deployment)["Deployment"]["spec"]["template"]["spec"]
    return found


def unit(deployment: Deployment) -> dict[str, list[str]]:
    """Values by key of a unit's settings, of all sections."""
    found: dict[str, list[str]] = {}
    for line in systemd.render(deployment, TGI).split("\n"):
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def unquoted(command: str) -> list[str]:
    """The words of ``ExecStart``, as systemd reads them."""
    found = []
    for quoted, bare in re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', command):
        text = quoted or bare
        data = re.sub(
            rb"\\(?:x([0-9a-f]{2})|(.))",
            lambda m: bytes([int(m[1], 16)]) if m[1] else m[2],
            text.encode(),
        )
        found.append(data.decode().replace("%%", "%").replace("$$", "$"))
    return found


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run a script with a ``docker`` that prints its arguments; returns them."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "docker"
    program.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    program.chmod(0o755)

    def run(script: str) -> list[str]:
        done = subprocess.run(
            ["/bin/sh", "-c", script], env={"PATH": str(folder)}, capture_output=True, check=True
        )
        return done.stdout.decode().split("\0")[:-1]

    return run


def test_arguments_reach_the_server_unchanged(run_script: Any) -> None:
    hostile = replace(PLAIN, arguments=("serve", *HOSTILE), notes=HOSTILE)
    _check_arguments(hostile, run_script)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arguments=st.lists(words, max_size=4))
def test_any_arguments_do(arguments: list[str], run_script: Any) -> None:
    _check_arguments(replace(PLAIN, arguments=("serve", *arguments), notes=()), run_script)


def _check_arguments(deployment: Deployment, run_script: Any) -> None:
    expected = list(deployment.arguments)
    ran = run_script(docker.render(deployment))
    assert ran[ran.index(deployment.image) + 1 :] == expected
    service = compose_file(deployment)["services"]["tgi"]
    assert [word.replace("$$", "$") for word in service["command"]] == expected
    args = pod(deployment)["containers"][0]["args"]
    assert [word.replace("$$", "$") for word in args] == expected
    lines = unit(deployment)
    assert unquoted(lines["ExecStart"][0]) == [str(TGI), *expected]
    assert {key: len(lines[key]) for key in lines} == {k: len(v) for k, v in unit(PLAIN).items()}


def test_files_of_the_host_are_mounted_at_their_own_paths(run_script: Any) -> None:
    path = Path('/models/a, "b" $HOME')
    deployment = replace(PLAIN, mounts=(path,))
    mounts = [word for word in run_script(docker.render(deployment)) if "models" in word]
    assert mounts == ['type=bind,"source=/models/a, ""b"" $HOME","target=/models/a, ""b"" $HOME"'
                      ",readonly"]  # fmt: skip
    volume = compose_file(deployment)["services"]["tgi"]["volumes"][1]
    assert volume["source"] == volume["target"] == str(path).replace("$", "$$")
    assert volume["read_only"]
    spec = pod(deployment)
    assert spec["volumes"][-1] == {"name": "files-0", "hostPath": {"path": str(path)}}
    mount = spec["containers"][0]["volumeMounts"][-1]
    assert mount == {"name": "files-0", "mountPath": str(path), "readOnly": True}


def test_sigkill_comes_after_the_drain(run_script: Any) -> None:
    deployment = replace(PLAIN, drain_seconds=300)
    ran = run_script(docker.render(deployment))
    assert ran[ran.index("--stop-timeout") + 1] == "310"
    assert compose_file(deployment)["services"]["tgi"]["stop_grace_period"] == "310s"
    assert unit(deployment)["TimeoutStopSec"] == ["310"]
    spec = pod(deployment)
    wait = int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] == 310 + wait


def test_memory_is_limited_without_swap(run_script: Any) -> None:
    ran = run_script(docker.render(PLAIN))
    assert ran[ran.index("--memory") + 1] == ran[ran.index("--memory-swap") + 1] == "3072m"
    service = compose_file(PLAIN)["services"]["tgi"]
    assert service["deploy"]["resources"]["limits"] == {"cpus": "4", "memory": "3072M"}
    assert service["memswap_limit"] == "3072M"
    lines = unit(PLAIN)
    assert (lines["MemoryMax"], lines["MemorySwapMax"]) == (["3072M"], ["0"])
    assert lines["CPUQuota"] == ["400%"]
    resources = pod(PLAIN)["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"] == {"cpu": "4", "memory": "3072Mi"}


def test_cores_and_nodes_are_bound_where_they_can_be(run_script: Any) -> None:
    bound = replace(PLAIN, cpuset_cpus="0-7,16", cpuset_mems="0")
    ran = run_script(docker.render(bound))
    assert ran[ran.index("--cpuset-cpus") + 1] == "0-7,16"
    assert ran[ran.index("--cpuset-mems") + 1] == "0"
    assert "--cpus" not in ran
    lines = unit(bound)
    assert (lines["CPUAffinity"], lines["NUMAPolicy"], lines["NUMAMask"]) == (
        ["0-7,16"],
        ["bind"],
        ["0"],
    )
    assert "CPUQuota" not in lines
    service = compose_file(replace(bound, cpuset_mems=""))["services"]["tgi"]
    assert service["cpuset"] == "0-7,16"
    assert "cpus" not in service["deploy"]["resources"]["limits"]
    with pytest.raises(ConfigError, match="NUMA"):
        compose.render(bound)
    with pytest.raises(ConfigError, match="cores"):
        kubernetes.render(bound)


def test_secrets_are_files_only(run_script: Any) -> None:
    both = replace(PLAIN, hf_token_file=Path("/etc/tgi/hf-token"))
    ran = run_script(docker.render(both))
    assert "type=bind,source=/etc/tgi/api-key,target=/run/secrets/api-key,readonly" in ran
    assert "API_KEY_FILE=/run/secrets/api-key" in ran
    assert "HF_TOKEN_PATH=/run/secrets/hf-token" in ran
    document = compose_file(both)
    assert document["services"]["tgi"]["secrets"] == ["api-key", "hf-token"]
    assert document["secrets"]["api-key"] == {"file": "/etc/tgi/api-key"}
    lines = unit(both)
    assert "api-key:/etc/tgi/api-key" in lines["LoadCredential"]
    assert "API_KEY_FILE=%d/api-key" in lines["Environment"]
    text = kubernetes.render(both)
    assert "# First: kubectl create secret generic tgi --from-file=api-key=/etc/tgi/api-key" in text
    assert {"name": "API_KEY_FILE", "value": "/run/secrets/api-key"} in pod(both)["containers"][0][
        "env"
    ]
    none = replace(PLAIN, api_key_file=None)
    for text in (docker.render(none), compose.render(none), kubernetes.render(none)):
        assert "secret" not in text.lower()


def test_gpus_come_with_shared_memory(run_script: Any) -> None:
    gpus = replace(PLAIN, gpus=2, memory=None)
    ran = run_script(docker.render(gpus))
    assert ran[ran.index("--gpus") + 1] == "2"
    assert ran[ran.index("--shm-size") + 1] == "1g"
    assert "--memory" not in ran
    service = compose_file(gpus)["services"]["tgi"]
    assert service["shm_size"] == "1g"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 2
    spec = pod(gpus)
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert any(volume["name"] == "shm" for volume in spec["volumes"])
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert "PrivateDevices" not in unit(gpus)


def test_a_pod_has_few_rights() -> None:
    spec = pod(PLAIN)
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec["automountServiceAccountToken"]
    context = spec["containers"][0]["securityContext"]
    assert context["readOnlyRootFilesystem"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    probes = {name: spec["containers"][0][name]["httpGet"]["path"] for name in
              ("startupProbe", "readinessProbe", "livenessProbe")}  # fmt: skip
    assert probes == {
        "startupProbe": "/health",
        "readinessProbe": "/health",
        "livenessProbe": "/v2/health/live",
    }


def test_objects_find_each_other() -> None:
    found = manifests(replace(PLAIN, name="chat"))
    template = found["Deployment"]["spec"]["template"]
    assert found["Service"]["spec"]["selector"] == template["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    claim = template["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"] == "chat"
    assert template["metadata"]["annotations"]["prometheus.io/port"] == "3000"


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "a b"},
        {"name": "-x"},
        {"name": "x\n"},
        {"name": "X"},
        {"image": "--privileged"},
        {"image": "a b"},
        {"cpuset_cpus": "0-7 --privileged"},
        {"cpuset_mems": "0\n"},
    ],
)
def test_names_that_are_not_quoted_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(PLAIN, **fields)


@pytest.mark.parametrize("path", ["/opt/my tgi/tgi", "/opt/%h/tgi", "tgi"])
def test_systemd_starts_plain_paths_only(path: str) -> None:
    with pytest.raises(ConfigError):
        systemd.render(PLAIN, Path(path))


def test_systemd_loads_credentials_of_plain_paths_only() -> None:
    with pytest.raises(ConfigError):
        systemd.render(replace(PLAIN, api_key_file=Path("/etc/a\nUser=root")), TGI)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    deployment = replace(
        PLAIN, arguments=("serve", *HOSTILE), cpuset_cpus="0-1", cpuset_mems="0", notes=HOSTILE
    )
    path = tmp_path / "tgi.service"
    path.write_text(systemd.render(deployment, Path("/bin/true")))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True
    )
    assert "tgi.service" not in done.stderr, done.stderr


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")
def test_docker_accepts_the_flags() -> None:
    """Its client parses them before it connects to the daemon."""
    deployment = replace(
        PLAIN, arguments=("serve", *HOSTILE), gpus=1, cpuset_cpus="0-1", cpuset_mems="0"
    )
    variables = {"PATH": os.environ["PATH"], "DOCKER_HOST": "tcp://127.0.0.1:1"}
    done = subprocess.run(
        ["/bin/sh", "-c", docker.render(deployment)], env=variables, capture_output=True, text=True
    )
    assert "tcp://127.0.0.1:1" in done.stderr, done.stderr


def test_paths_among_values(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    found = existing_paths(
        [None, "org/model", (f"sql={adapter}", "a=b"), [str(tmp_path)], "x" * 9999]
    )
    assert found == (adapter, tmp_path)


def test_links_in_mounted_folders_lead_somewhere(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "a").touch()
    (snapshot / "config.json").symlink_to("../../blobs/a")
    assert with_link_targets([snapshot, blobs / "a"]) == (snapshot, blobs / "a", blobs)


def test_comments_have_one_line() -> None:
    assert printable("a\nb\u2028c\x85") == "a\\nb\\u2028c\\x85"
