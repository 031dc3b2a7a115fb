"""Start a model with extreme files or flags, under limits of time and memory.

Checkpoints are loaded in a child forked from a process that has imported everything. It reads all
that a server reads at startup (config, weights, tokenizer, chat template, adapter, generation
defaults) and generates one chat response; miniatures of other models generate two tokens. Flags
are passed to ``tgi serve``: each gets the extremes of its kind.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.benchmarks.adversary import checkpoints, models, report
from tests.benchmarks.adversary.measure import Result
from tests.benchmarks.adversary.monitor import memory_of
from tests.benchmarks.adversary.served_starts import ServedStarts
from tests.tools.checkpoints import make_llama
from tests.tools.lora_adapters import make_adapter
from tgi_cli import demo
from tgi_cli.config.settings import settings_of
from tgi_cli.config.settings.setting import SERVE
from tgi_cli.config.settings.values import ValueKind
from tgi_cli.errors import ExitCode, TgiError

SECONDS = 15.0
"""Budget: how much longer a start may take than a normal one. Of checkpoints, CPU time counts; of
flags, the time that passes, in the best of three runs if the first is late."""
MEGABYTES = 256
"""Budget: how much more memory a start may use; some of the files have tens of MB."""
_ADDRESS_SPACE = 3 << 30
"""Bytes of address space that a child may use beyond the imports (RLIMIT_AS)."""
_WALL_SECONDS = 120.0
"""When a child that waits, or computes beside much else, is ended."""
_UNEXPECTED = 99
_MODULES = (
    "tgi_cli.llm.llm",
    "tgi_cli.router.generation.sampling_defaults",
    "tgi_cli.text.bundle",
    "torch",
)
SERVED = ("eos_token_id", "bos_token_id", "max_position_embeddings", "model_max_length")
"""Fields that one process of the server sends to another; when the child accepts a number for
one of them, the server itself is started, too."""
NUMBERS = ("0", "1e-9", "1", "1000000000", "1" + "0" * 30, "1e308")
"""Beside the bounds of a flag; the least and the largest that it takes are tried."""
WORDS: dict[type, tuple[str, ...]] = {
    tuple: (",".join(map(str, range(1, 4097))), "a," * 50_000),
    list: ("a" * 100_000, "a=/none"),
    str: ("a" * 100_000, "\x1b[2J'\"$(x)`y`\n{{ z }}%s%n"),
    Path: ("/dev/zero", "/dev/null/a", "/proc/self"),
}
"""Of flags that are no numbers, by type."""
OTHER_FLAGS: tuple[tuple[str, ...], ...] = (
    ("--config", "/dev/zero"),
    ("--config", "/dev/stdin"),
    ("--logger-level", "zzz,=,,=x"),
    ("--lora-adapters", ",".join(f"a{n}=/none" for n in range(5000))),
    ("--model-id", "a" * 100_000),
    ("--chat-template", "/dev/zero"),
    ("--cuda-graphs", ",".join(map(str, range(1, 20_000)))),
    ("--api-key", "a" * 100_000),
    ("--cors-allow-origin", "a" * 100_000),
)
"""Values of flags that are not numeric."""


def run(parts: Sequence[str], wanted: Callable[[str], bool]) -> list[Result]:
    """Run the parts that start models, for the files and flags that are ``wanted``."""
    results: list[Result] = []
    _import_all()
    with tempfile.TemporaryDirectory(prefix="tgi-") as name:
        folder = Path(name)
        base = make_llama(
            folder / "base",
            files=2,
            vocab_size=4096,
            tokenizer=demo.model_path(),
            max_position_embeddings=512,
        )
        adapter = make_adapter(base, folder / "adapter")
        began = time.monotonic()
        try:
            if "checkpoints" in parts:
                _checkpoints(folder, base, adapter, wanted, results)
            _models(folder, parts, wanted, results)
            if "flags" in parts:
                _flags(folder, base, wanted, results)
        except KeyboardInterrupt:
            print("interrupted; showing the results so far", file=sys.stderr)
    table = []
    slow = report.worst(results, lambda one: one.seconds)
    large = report.worst(results, lambda one: one.largest_growth)
    for file, one in slow.items():
        own = [result for result in results if result.route == file]
        codes = sorted({code for result in own for code in result.statuses})
        table.append(
            [
                file,
                str(len(own)),
                f"{one.seconds:.1f}",
                f"{one.field} {one.kind}",
                f"{large[file].largest_growth / 2**20:.0f}",
                f"{large[file].field} {large[file].kind}",
                " ".join(codes),
                str(sum(bool(result.violations) for result in own)),
            ]
        )
    head = ["file or flag", "cases", "s", "by", "MB", "by", "exit codes", "exceeded"]
    report.show(head, table, "The worst field of each file, and the worst flag")
    report.show_violations(results)
    exceeded = sum(bool(one.violations) for one in results)
    print(
        f"\n{len(results)} starts, {exceeded} exceeded the budget; {time.monotonic() - began:.0f} s"
    )
    return results


def _load(folder: Path, adapter: Path) -> str:
    """Load a model and generate a chat response, or raise TgiError."""
    from tgi_cli.llm.llm import LLM
    from tgi_cli.llm.outputs import GenerationError
    from tgi_cli.router.generation.sampling_defaults import SamplingDefaults
    from tgi_cli.text.chat_template import ChatTemplateError

    SamplingDefaults.read(folder)
    with LLM(folder, max_batch_total_tokens=1024, lora_adapters={"a": adapter}) as model:
        try:
            messages = [{"role": "user", "content": "a"}]
            return str(model.chat(messages, max_new_tokens=2, adapter="a"))
        except (GenerationError, ChatTemplateError, ValueError) as error:
            return f"refused: {error}"


def _child(work: Callable[[], object], log: Path) -> tuple[int, float, int]:
    """Fork and run ``work``; return exit code (-1 on timeout), CPU seconds and peak bytes.

    Of the time, only what the child has computed counts, so that other programs do not matter.
    """
    pid = os.fork()
    if pid == 0:
        code = _UNEXPECTED
        try:
            # Startup collects garbage several times; the parent's objects need not be searched.
            gc.freeze()
            os.setsid()
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(out, descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + _ADDRESS_SPACE,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS * 2), int(SECONDS * 3)))
            Path("/proc/self/clear_refs").write_text("5")
            print(work(), flush=True)
            code = 0
        except TgiError as error:
            print(f"error: {error.cause}", flush=True)
            code = int(error.exit_code)
        except BaseException:
            traceback.print_exc()
        finally:
            peak = memory_of(os.getpid(), "VmHWM")
            with contextlib.suppress(OSError), log.with_suffix(".peak").open("w") as file:
                file.write(str(peak))
            os._exit(code)
    limit = time.monotonic() + _WALL_SECONDS
    peak = 0
    while time.monotonic() < limit:
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            break
        peak = max(peak, memory_of(pid, "VmHWM"))
        time.sleep(0.01)
    else:
        status = -1
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status == -1:
        _, _, used = os.wait4(pid, 0)
    with contextlib.suppress(OSError, ValueError):
        peak = max(peak, int(log.with_suffix(".peak").read_text()))
        log.with_suffix(".peak").unlink()
    code = -1 if status == -1 else os.waitstatus_to_exitcode(status)
    code = -1 if code == -signal.SIGXCPU else code
    return code, used.ru_utime + used.ru_stime, peak


def _checkpoints(
    folder: Path,
    base: Path,
    adapter: Path,
    wanted: Callable[[str], bool],
    results: list[Result],
) -> None:
    log = folder / "log"
    code, baseline, size = _child(lambda: _load(base, adapter), log)
    if code:
        raise SystemExit(f"the miniature itself does not load:\n{log.read_text()}")
    print(f"the miniature: {baseline:.1f} s, {size >> 20} MB", file=sys.stderr)
    served = ServedStarts(base, folder / "served-log", SECONDS)
    file = ""
    for case in checkpoints.cases(base, adapter):
        if not wanted(f"{case.file} {case.field}"):
            continue
        if case.file != file:
            print(f"{case.file} ...", file=sys.stderr)
            file = case.file
        checkpoint = checkpoints.linked_copy(base, folder / "case")
        tuned_adapter = checkpoints.linked_copy(adapter, folder / "case-adapter")
        case.write(tuned_adapter if case.file.startswith("adapter") else checkpoint)
        code, seconds, peak = _child(
            lambda checkpoint=checkpoint, tuned_adapter=tuned_adapter: _load(
                checkpoint, tuned_adapter
            ),
            log,
        )
        result = Result(case.file, case.field, case.kind, {str(code): 1}, seconds)
        result.growth = {"process": peak - size}
        result.violations = list(_violations_of(code, seconds - baseline, peak - size, log))
        if code == 0 and set(case.field.split(".")) & set(SERVED) and case.kind[-1:].isdigit():
            start = served.start(checkpoint)
            result.statuses[f"{start.code} served"] = 1
            result.violations += _violations_of(start.code, start.more, 0, served.log)
        results.append(result)
        if result.violations:
            where = f"{case.file} {case.field} {case.kind}"
            print(f"  {where}: {'; '.join(result.violations)}", file=sys.stderr)


def _import_all() -> None:
    """Import what children need, and let torch start no threads, which a fork would lack."""
    for module in _MODULES:
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)


def _models(
    folder: Path, parts: Sequence[str], wanted: Callable[[str], bool], results: list[Result]
) -> None:
    """Run the parts of :mod:`tests.benchmarks.adversary.models`."""
    log = folder / "log"
    os.environ["HF_HUB_CACHE"] = str(folder / "cache" / "hub")
    for subject in models.subjects(list(parts)):
        base = folder / "miniature"
        shutil.rmtree(base, ignore_errors=True)
        subject.make(base)
        cases = [
            case
            for case in subject.cases(base)
            if wanted(f"{subject.name} {case.file} {case.field}")
        ]
        if not cases:
            continue
        code, baseline, size = _child(partial(subject.load, base), log)
        if code:
            raise SystemExit(f"{subject.name} itself does not load:\n{log.read_text()}")
        print(f"{subject.name}: {len(cases)} cases ...", file=sys.stderr)
        for case in cases:
            copy = checkpoints.linked_copy(base, folder / "case")
            case.write(copy)
            code, seconds, peak = _child(partial(subject.load, copy), log)
            result = Result(
                f"{subject.part}: {case.file}",
                f"{subject.name}: {case.field}",
                case.kind,
                {str(code): 1},
                seconds,
            )
            result.growth = {"process": peak - size}
            result.violations = list(_violations_of(code, seconds - baseline, peak - size, log))
            results.append(result)
            if result.violations:
                where = f"{subject.name} {case.file} {case.field} {case.kind}"
                print(f"  {where}: {'; '.join(result.violations)}", file=sys.stderr)


def _violations_of(code: int, more: float, growth: int, log: Path) -> Iterator[str]:
    """Yield the violations of one start."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if code == -1:
        yield "timeout"
    elif code not in {int(one) for one in ExitCode} or "Traceback (most recent" in text:
        yield f"exit {code}: {(text.strip().splitlines() or [''])[-1][:160]}"
    elif code and "error:" not in text:
        yield f"exit {code} without an error message"
    if more > SECONDS and code != -1:
        yield f"{more:.0f} s"
    if growth > MEGABYTES << 20:
        yield f"{growth >> 20} MB"


def _flags(folder: Path, base: Path, wanted: Callable[[str], bool], results: list[Result]) -> None:
    served = ServedStarts(base, folder / "flags-log", SECONDS)
    normal = served.normal
    print(f"the miniature, served: {normal.seconds:.1f} s, {normal.peak >> 20} MB", file=sys.stderr)
    for flags in (*of_settings(), *OTHER_FLAGS):
        if not wanted(flags[0]):
            continue
        start = served.start(base, flags)
        growth = start.peak - normal.peak
        statuses = {str(start.code): 1}
        result = Result("(flags)", flags[0], flags[1][:24], statuses, start.seconds)
        result.runs = start.runs
        result.growth = {"all": growth}
        result.violations = list(_violations_of(start.code, start.more, growth, served.log))
        results.append(result)
        if result.violations:
            print(f"  {flags[0]} {flags[1][:24]}: {'; '.join(result.violations)}", file=sys.stderr)


def of_settings() -> Iterator[tuple[str, str]]:
    """Yield all flags with the extreme values that their kinds can parse."""
    for setting in settings_of(SERVE):
        if setting.hidden or setting.argument or setting.alias_of:
            continue
        for word in _extremes(setting.kind):
            yield setting.flag, word


def _extremes(kind: ValueKind) -> list[str]:
    if kind.type not in (int, float):
        return [] if kind.choices else [word for word in WORDS.get(kind.type, ()) if word]
    known: dict[float, str] = {}
    bounds = kind.parse.args if isinstance(kind.parse, partial) else ()
    for word in (*map(str, bounds), "1MiB", "909494TiB", *NUMBERS):
        with contextlib.suppress(ValueError):
            value = kind.read(word)
            if value is not None:
                known.setdefault(value, word)
    ends = (min(known), max(known)) if known else ()  # empty for one of a few numbers
    return list(dict.fromkeys(known[each] for each in ends))
