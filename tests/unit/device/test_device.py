from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tgi_cli.device import (
    available_memory,
    default_threads,
    describe,
    facts,
    peak_memory,
    set_threads,
    threads,
    total_memory,
)
from tgi_cli.device.distributed import Shard
from tgi_cli.errors import ConfigError
from tgi_cli.process import cores, system_memory
from tgi_cli.process.cores import Core

CPU = torch.device("cpu")
GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def test_a_cpu_is_described() -> None:
    found = describe("cpu")
    assert found.kind == "cpu"
    assert found.name
    assert 0 < found.total_memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not torch.cuda.is_available():
        assert describe(None) == found


def test_unavailable_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        describe("cuda")
    with pytest.raises(ConfigError, match="unknown device 'tpu'"):
        describe("tpu")


@pytest.mark.parametrize(
    ("cpuinfo", "name", "native"),
    [
        ("model name\t: Xeon\nflags\t\t: fpu avx2 avx512_bf16\n", "Xeon", True),
        ("model name\t: Xeon\nflags\t\t: fpu amx_bf16 amx_tile\n", "Xeon", True),
        ("model name\t: Old\nflags\t\t: fpu avx2 avx512f\n", "Old", False),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n", None, True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", None, False),
        (None, None, False),
    ],
)
def test_native_bfloat16_is_a_flag_of_the_processor(
    cpuinfo: str | None,
    name: str | None,
    native: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(facts, "_CPUINFO", tmp_path / "cpuinfo")
    found = describe("cpu")
    assert found.native_bfloat16 == native
    assert name is None or found.name == name


MEMINFO = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"


def test_version_2_groups_limit_memory_at_every_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/kubepods/pod/box\n",
            "sys/fs/cgroup/kubepods/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/kubepods/pod/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/kubepods/pod/memory.current": f"{GIB // 2}\n",
            "sys/fs/cgroup/kubepods/pod/memory.stat": f"anon 7\nfile {GIB // 4}\nfile_mapped 9\n",
            "sys/fs/cgroup/kubepods/memory.max": f"{4 * GIB}\n",
        },
    )
    monkeypatch.setattr(system_memory, "ROOT", tmp_path)
    assert total_memory(CPU) == GIB
    assert available_memory(CPU) == GIB - (GIB // 2 - GIB // 4)


def test_version_1_groups_limit_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:cpu:/x\n4:memory,hugetlb:/docker/abc\n",
            # Inside a container the group's own files stand at the mount's root.
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"cache 3\ntotal_cache {GIB // 2}\n",
        },
    )
    monkeypatch.setattr(system_memory, "ROOT", tmp_path)
    assert total_memory(CPU) == 2 * GIB
    assert available_memory(CPU) == 2 * GIB - GIB // 2


def test_without_limits_the_system_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    monkeypatch.setattr(system_memory, "ROOT", tmp_path)
    assert total_memory(CPU) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_memory(CPU) == 8 * GIB


def test_peak_memory_only_grows() -> None:
    before = peak_memory(CPU)
    block = torch.ones(64 << 20, dtype=torch.uint8)
    grown = peak_memory(CPU)
    assert grown >= before
    assert grown > block.numel()
    del block
    # The kernel counts pages in batches, a few per thread: the figure is not exact.
    assert peak_memory(CPU) >= grown - (4 << 20)


@pytest.mark.parametrize(
    ("environment", "quota", "wanted"),
    [
        ("3", "max 100000", 3),
        ("4,2", "max 100000", 4),
        (None, "max 100000", 2),
        ("0", "max 100000", 2),
        (None, "100000 100000", 1),
        (None, "150000 100000", 2),
        (None, None, 2),
    ],
)
def test_threads_are_the_physical_cores_within_reach(
    environment: str | None,
    quota: str | None,
    wanted: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        name = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        write(tmp_path, {name: siblings + "\n"})
    if quota is not None:
        write(tmp_path, {"sys/fs/cgroup/cpu.max": quota + "\n"})
    monkeypatch.setattr(cores, "_ROOT", tmp_path)
    monkeypatch.setattr(cores, "_affinity", lambda: {0, 1, 2, 3})
    if environment is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    assert default_threads() == wanted


def test_a_version_1_quota_and_an_unknown_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "_ROOT", tmp_path)
    monkeypatch.setattr(cores, "_affinity", lambda: {0, 1, 2, 3, 4})
    assert default_threads() == 5
    folder = "sys/fs/cgroup/cpu"
    write(tmp_path, {f"{folder}/cpu.cfs_quota_us": "-1\n", f"{folder}/cpu.cfs_period_us": "10\n"})
    assert default_threads() == 5
    write(tmp_path, {f"{folder}/cpu.cfs_quota_us": "25\n"})
    assert default_threads() == 3


def test_a_small_model_computes_with_one_thread_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: [Core(0, (0,)), Core(0, (1,))])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert default_threads(threads.SMALL_MODEL - 1) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert default_threads(threads.SMALL_MODEL - 1) == 2


@pytest.mark.parametrize(("processes", "each"), [(1, 6), (2, 3), (4, 1), (8, 1)])
def test_processes_share_the_cores(
    processes: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: [Core(0, (cpu,)) for cpu in range(6)])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert default_threads(processes=processes) == each


def test_torch_computes_with_the_threads_that_are_set() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(3) == 3
        assert torch.get_num_threads() == 3
        assert set_threads() == default_threads() == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("variables", "chosen"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, 3),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "all"}, 1),
    ],
)
def test_devices_in_the_environment_are_counted(
    variables: dict[str, str], chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert facts.devices_in_environment(4) == chosen


@pytest.mark.parametrize("awaited", [True, False])
def test_sums_of_gpus_are_launched_on_the_current_stream(awaited: bool) -> None:
    calls = []

    class Work:
        def wait(self) -> None:
            calls.append("awaited")

    class Group:
        def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work | None:
            calls.append(options.asyncOp)
            tensors[0] *= 2
            return Work() if awaited else None

    group: Any = Group()
    shard = Shard(0, 2, torch.device("cuda", 0), group)
    x = torch.tensor([1.5])
    assert shard.all_reduce(x) is x
    assert x == 3.0
    assert calls == [False, "awaited"][: 1 + awaited]
