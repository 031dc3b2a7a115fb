"""Sections of a call: run one after the other, within its time, and reported as they end."""

from __future__ import annotations

import gc
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
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
    """

    name: str
    run: Callable[[Call], Any]
    seconds: float = 10.0


@dataclass
class Call:
    """The state that the sections of a call share.

    Attributes:
        name: of the call.
        kind: of the device.
        out: folder of the figures.
        minutes: its time.
        shape_name: the model that most sections run.
        results: figures and failures so far.
    """

    name: str
    kind: str
    out: Path
    minutes: float
    shape_name: str
    results: dict[str, Any] = field(default_factory=dict)
    _made: tuple[Any, Worker] | None = None
    _device: Device | None = None

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + 60 * self.minutes
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-"))
        self.large = self.kind == "cuda"
        self.results = {"versions": versions(), "shape": self.shape_name, "sections": {}}

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.deadline - time.monotonic()

    @property
    def device(self) -> Device:
        """The device and its limits, measured when first asked for."""
        if self._device is None:
            self._device = measure(torch.device(self.kind), torch.bfloat16)
        return self._device

    def run(self, sections: Sequence[Section], only: Sequence[str] | None = None) -> int:
        """Run the sections; returns 1 if any of them failed, else 0."""
        for section in sections:
            if only is None or section.name in only:
                self.section(section)
        found = self.results["sections"].items()
        failed = [name for name, entry in found if "failed" in entry]
        print(f"\nwritten to {self.out}; failed: {', '.join(failed) or 'none'}")
        return 1 if failed else 0

    def section(self, section: Section) -> None:
        """Run a section, record its figures or its failure, and save all results."""
        began = time.monotonic()
        entry: dict[str, Any] = {}
        if self.left < section.seconds * self.large:
            entry["failed"] = f"not begun: {self.left:.0f} s left, it takes {section.seconds:.0f}"
        else:
            try:
                entry["figures"] = section.run(self)
            except Exception as error:  # a failure must not stop the other sections
                entry["failed"] = f"{type(error).__name__}: {error}"
                entry["where"] = traceback.format_exc().splitlines()[-12:]
        entry["seconds"] = round(time.monotonic() - began, 1)
        self.results["sections"][section.name] = entry
        print(f"\n{render(section.name, entry)}", flush=True)
        self.save()

    def save(self) -> None:
        """Write what there is."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{self.name}.json").write_text(json.dumps(self.results, indent=2) + "\n")
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
