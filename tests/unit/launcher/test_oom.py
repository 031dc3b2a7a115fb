"""The kernel's count of out-of-memory kills, in a cgroup or of the whole machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tgi_cli.launcher.oom import Kills, explain, kills


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"
VMSTAT = {"proc/vmstat": "nr_free_pages 1234\noom_kill 9\n"}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, None),
        (VMSTAT, Kills(9, "this machine")),
        (
            VMSTAT
            | {
                "proc/self/cgroup": "0::/a.slice/b\n",
                "sys/fs/cgroup/a.slice/b/memory.events": EVENTS,
            },
            Kills(2, "this cgroup"),
        ),
        (
            VMSTAT | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": EVENTS},
            Kills(2, "this cgroup"),
        ),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/x\n4:cpu,memory:/docker/1\n",
                "sys/fs/cgroup/memory/docker/1/memory.oom_control": "under_oom 0\noom_kill 7\n",
            },
            Kills(7, "this cgroup"),
        ),
        (VMSTAT | {"proc/self/cgroup": "3:cpu:/\n0::/gone\n"}, Kills(9, "this machine")),
        ({"proc/vmstat": "oom_kill many\n"}, None),
    ],
)
def test_the_count_is_read(tmp_path: Path, files: dict[str, str], found: Kills | None) -> None:
    write(tmp_path, files)
    assert kills(tmp_path) == found


def test_only_a_growing_count_explains_a_kill() -> None:
    two, four = Kills(2, "this machine"), Kills(4, "this machine")
    assert "killed 2 processes of this machine because memory ran out" in explain(two, four)
    assert "memory did not run out" in explain(two, two)
    for before, now in ((None, two), (two, None), (two, Kills(5, "this cgroup"))):
        assert "out-of-memory killer did that" in explain(before, now)
