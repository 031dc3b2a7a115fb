"""A model server's heartbeat reaches the reader and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from tests.unit.model_server.fakes import INFO
from tgi_cli.engine.messages import EngineInfo
from tgi_cli.errors import ConfigError
from tgi_cli.process.heartbeat import (
    HeartbeatReading,
    HeartbeatWriter,
    SharedHeartbeat,
    StallDetector,
    State,
    allowed_seconds,
)

CHILD = """
import sys, time
from tgi_cli.process.heartbeat import HeartbeatWriter, SharedHeartbeat, State
class Engine:
    progress, live_requests = 41, 7
with HeartbeatWriter(SharedHeartbeat.attach(int(sys.argv[1]))).beating() as writer:
    writer.enter(State.WARMING_UP)
    writer.watch(Engine, 1.5)
    sys.stdin.read()
    writer.enter(State.DRAINING)
"""


def read_until(heartbeat: SharedHeartbeat, state: State) -> HeartbeatReading:
    end = time.monotonic() + 60
    while (reading := heartbeat.read()).state is not state:
        assert time.monotonic() < end, reading
        time.sleep(0.01)
    return reading


def test_a_child_writes_its_heartbeat() -> None:
    heartbeat = SharedHeartbeat.create()
    assert heartbeat.read() == HeartbeatReading(0, State.STARTING, 0, 0, 0.0)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(heartbeat.fd)],
        pass_fds=[heartbeat.fd],
        stdin=subprocess.PIPE,
    )
    try:
        first = read_until(heartbeat, State.SERVING)
        assert (first.progress, first.live, first.step_seconds) == (41, 7, 1.5)
        end = time.monotonic() + 60
        while heartbeat.read().beats < first.beats + 2:
            assert time.monotonic() < end, "it beats by itself"
            time.sleep(0.01)
        child.communicate(timeout=60)
        assert heartbeat.read().state is State.DRAINING
    finally:
        child.kill()
        child.wait()
        heartbeat.close_fd()


def test_the_engines_info_is_published() -> None:
    heartbeat = SharedHeartbeat.create()
    assert heartbeat.published() is None
    info = replace(INFO, model_id="org/m\u00f6del " + 4096 * "x", revision="")
    with HeartbeatWriter(SharedHeartbeat.attach(os.dup(heartbeat.fd))).beating() as writer:
        writer.publish(asdict(info))
    assert EngineInfo.from_dict(heartbeat.published() or {}) == info
    assert heartbeat.read().state is State.LOADING
    heartbeat.close_fd()


def test_a_writer_without_a_heartbeat_does_nothing() -> None:
    with HeartbeatWriter(None).beating() as writer:
        writer.publish(asdict(INFO))
        writer.enter(State.SERVING)


def test_an_invalid_descriptor_is_an_error() -> None:
    with pytest.raises(ConfigError, match="descriptor 10000 is not"):
        SharedHeartbeat.attach(10_000)
    reading, writing = os.pipe()
    try:
        with pytest.raises(ConfigError, match="is not a model server's heartbeat"):
            SharedHeartbeat.attach(reading)
    finally:
        os.close(reading)
        os.close(writing)


def test_only_polled_time_counts_as_a_stall() -> None:
    still = StallDetector(longest=2.0)
    assert [still.poll(1, now) for now in (0.0, 1.0, 2.0)] == [0.0, 1.0, 2.0]
    assert still.poll(1, 1000.0) == 4.0, "it was not polled for long"
    assert still.poll(2, 1001.0) == 0.0
    assert still.poll(2, 1002.0) == 1.0
    assert still.poll(None, 1003.0) == 0.0, "it need not move"
    assert still.poll(None, 1005.0) == 0.0
    assert still.poll(2, 1006.0) == 0.0


def test_slow_steps_extend_the_timeout() -> None:
    assert allowed_seconds(60.0, 0.0) == 60.0
    assert allowed_seconds(60.0, 30.0) == 120.0
