"""Sections of a call: run one after the other, each within its time, and reported as they end."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu.device import Device, measure, versions
from tests.benchmarks.gpu.engine import make
from tests.benchmarks.gpu.shapes import Shape, write_shape
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.worker.worker import ModelWorker

Worker = tuple[ModelWorker, SchedulerConfig]


@dataclass(frozen=True)
class Section:
    """One part of a call.

    Attributes:
        name: of the section.
        run: returns figures: by name, or a list of rows.
        seconds: that must be left of the call's time on a GPU, or it is not begun.
        limit: seconds that it may take on a GPU. The process ends if it takes longer.
    """

    name: str
    run: Callable[[Call], Any]
    seconds: float = 10.0
    limit: float = 90.0


GRACE = 10.0
"""Seconds beyond its limit after which a section's process ends: time to stop by itself."""

RESTART_SECONDS = 90.0
"""What a process that takes up a call may need beyond its first section's limit: for the model."""

DEVICE_LOST = 3
"""The exit status of a process whose device does not work any more, with sections left to run."""


@dataclass
class Call:
    """The state that the sections of a call share.

    Attributes:
        name: of the call.
        kind: of the device.
        out: folder of the figures.
        minutes: its time.
        shape_name: the model that most sections run.
        resumed: whether to go on with the results that are in ``out``.
        results: figures and failures so far.
    """

    name: str
    kind: str
    out: Path
    minutes: float
    shape_name: str
    resumed: bool = False
    results: dict[str, Any] = field(default_factory=dict)
    _made: tuple[Any, Worker] | None = None
    _device: Device | None = None

    def __post_init__(self) -> None:
        self.deadline = self._section_deadline = time.monotonic() + 60 * self.minutes
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-"))
        self.large = self.kind == "cuda"
        self.out.mkdir(parents=True, exist_ok=True)
        self.results = {"versions": versions(), "shape": self.shape_name, "sections": {}}
        self._restart_seconds = 0.0
        if self.resumed:
            self._restart_seconds = RESTART_SECONDS
            self.results["sections"] = saved_sections(self.out, self.name)

    @property
    def left(self) -> float:
        """Seconds left, of the call and of the section that runs."""
        return min(self.deadline, self._section_deadline) - time.monotonic()

    @property
    def device(self) -> Device:
        """The device and its limits, measured when first asked for."""
        if self._device is None:
            self._device = measure(torch.device(self.kind), torch.bfloat16)
        return self._device

    def run(self, sections: Sequence[Section], only: Sequence[str] | None = None) -> int:
        """Run the sections; returns 1 if any of them failed, else 0, or DEVICE_LOST."""
        try:
            for section in sections:
                if only is not None and section.name not in only:
                    continue
                if not self.section(section) and self._device_is_lost():
                    return DEVICE_LOST
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return report(self.out, self.name)

    def section(self, section: Section) -> bool:
        """Run a section, and save its figures or its failure; returns False if it raised."""
        began = time.monotonic()
        entries = self.results["sections"]
        # What is on record if the process does not come to the end of it.
        entries[section.name] = {"failed": "it ended the process, or took too long", "seconds": 0}
        self.save()
        entry: dict[str, Any] = {}
        raised = False
        self._section_deadline = self.deadline
        if self.left < section.seconds * self.large:
            entry["failed"] = f"not begun: {self.left:.0f} s left, it takes {section.seconds:.0f}"
        else:
            if self.large:
                self._section_deadline = began + section.limit + self._restart_seconds
                self._restart_seconds = 0.0
            try:
                with _ended_after(self.left + GRACE if self.large else None):
                    entry["figures"] = section.run(self)
            except Exception as error:  # a failure must not stop the other sections
                raised = True
                entry["failed"] = f"{type(error).__name__}: {error}"
                entry["where"] = traceback.format_exc().splitlines()[-12:]
                if "OutOfMemory" in type(error).__name__:
                    self.free()
        entry["seconds"] = round(time.monotonic() - began, 1)
        entries[section.name] = entry
        print(f"\n{render(section.name, entry)}", flush=True)
        self.save()
        return not raised

    def program(self, command: Sequence[str], path: Path, **environment: str) -> str:
        """Run a program within the time that is left; its output is in a file as it comes.

        Raises:
            AssertionError: it failed, or was not done in time; the message has the output's end.
        """
        done: int | str
        with path.open("w") as output:
            try:
                done = subprocess.run(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=max(self.left, 1),
                    env=os.environ | environment,
                ).returncode
            except subprocess.TimeoutExpired as error:
                done = f"not done within {error.timeout:.0f} s"
        text = path.read_text(errors="replace")
        assert done == 0, f"{done}; {path.name} ends with:\n" + "\n".join(text.splitlines()[-40:])
        return text

    def _device_is_lost(self) -> bool:
        """Whether an error has left the device unusable for this process."""
        if not self.large:
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def save(self) -> None:
        """Write what there is."""
        path = self.out / f"{self.name}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(self.results, indent=2) + "\n")
        new.replace(path)  # a process that ends meanwhile leaves the one or the other
        parts = [f"# {self.results['versions']}\n"]
        parts += [render(name, entry) for name, entry in self.results["sections"].items()]
        (self.out / f"{self.name}.md").write_text("\n\n".join(parts) + "\n")

    def shape(self, name: str | None = None) -> Shape:
        """The shape of a name, by default the call's, whose config.json is then in ``folder``."""
        name = name or self.shape_name
        return write_shape(name, self.folder / name)

    def worker(self, shape: str | None = None, **options: Any) -> Worker:
        """A worker of a shape with these options, warmed up; the last one is kept."""
        key = (shape or self.shape_name, tuple(sorted(options.items())))
        if self._made is None or self._made[0] != key:
            self.free()
            self.shape(key[0])
            made = make(self.folder / key[0], self.kind, dtype="bfloat16", **options)
            self._made = key, made
        return self._made[1]

    def free(self) -> None:
        """Free the worker's memory."""
        self._made = None
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _ended_after(seconds: float | None) -> Iterator[None]:
    """End the process, with a traceback of each thread, unless this is over in time.

    A kernel that hangs leaves the host in a call that nothing else interrupts.
    """
    if seconds is not None:
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def saved_sections(out: Path, call: str) -> dict[str, Any]:
    """The sections that a call has saved; empty if there are none."""
    path = out / f"{call}.json"
    if not path.exists():
        return {}
    sections: dict[str, Any] = json.loads(path.read_text())["sections"]
    return sections


def report(out: Path, call: str) -> int:
    """Print what has failed of a call; returns 1 if anything has, else 0."""
    failed = [name for name, entry in saved_sections(out, call).items() if "failed" in entry]
    print(f"\nwritten to {out}; failed: {', '.join(failed) or 'none'}", flush=True)
    return 1 if failed else 0


def render(name: str, entry: dict[str, Any]) -> str:
    """Format a section as Markdown."""
    lines = [f"## {name} ({entry['seconds']} s)", ""]
    figures = entry.get("figures")
    if "failed" in entry:
        lines.append(f"failed: {entry['failed']}")
    elif isinstance(figures, dict):
        lines += [f"- {key}: {shown(value)}" for key, value in figures.items()]
    elif figures:
        columns = list(dict.fromkeys(key for row in figures for key in row))
        lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [
            f"| {' | '.join(shown(row.get(column)) for column in columns)} |" for row in figures
        ]
    else:
        lines.append("nothing to report")
    return "\n".join(lines)


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
