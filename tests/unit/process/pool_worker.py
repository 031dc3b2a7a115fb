"""A child for the tests of :mod:`tgi_cli.process.worker_pool`; its jobs are instructions."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tgi_cli.process.pool_worker import Reply, serve


def _begin(setup: Any) -> Any:
    held: list[bytes] = []

    def work(body: bytes) -> Reply:
        job = json.loads(body.rstrip(b"\0"))
        if "sleep" in job:
            time.sleep(job["sleep"])
        while "until" in job and not Path(job["until"]).exists():
            time.sleep(0.01)
        if "take" in job:
            taken = b"x" * (job["take"] << 20)
            del taken
        if "hold" in job:
            held.append(b"x" * (job["hold"] << 20))
        if "loop" in job:
            pieces = []
            while True:
                pieces.append("x" * 100)
        if "signal" in job:
            os.kill(os.getpid(), job["signal"])
            time.sleep(60)
        if "exit" in job:
            os._exit(job["exit"])
        if "raise" in job:
            raise SystemExit(job["raise"])
        answer = {"setup": setup, "pid": os.getpid(), "echo": job.get("echo")}
        if "buffers" in job:
            return answer, [bytes((n % 256,)) * size for n, size in enumerate(job["buffers"])]
        return answer

    return work


if __name__ == "__main__":
    serve(_begin)
