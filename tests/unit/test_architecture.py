"""The house rules that no reviewer should have to check by eye."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tgi_cli

PACKAGE = Path(tgi_cli.__file__).parent

# A room imports from rooms further down, never from one above. The engine stands below the
# worker because it owns their contract (engine/step.py): it knows a worker only as a protocol.
ROOMS = [
    "cli",
    "launcher",
    "bench",
    "router",
    "offline",
    "compression",
    "text",
    "rpc",
    "worker",
    "engine",
    "sampling",
    "models",
    "layers",
    "attention",
    "quantization",
    "kernels",
    "device",
]
SIDE_ROOMS = {"hub", "demo"}
"""Stand beside the stack: everybody above may use them, they use only what everybody may."""
FOUNDATION = {"config", "errors", "logging", "__init__"}

MAX_LINES = 400
GENERATED = ("_pb2.py", "_pb2_grpc.py")


def modules() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if not p.name.endswith(GENERATED)]


def imported_names(path: Path) -> Iterator[str]:
    """Every absolute module name that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_folder_of_the_package_is_a_known_room() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == set(ROOMS) | SIDE_ROOMS | {"config"}


def test_imports_run_downward_only() -> None:
    wrong = []
    for path in modules():
        parts = path.relative_to(PACKAGE).parts
        here = parts[0] if len(parts) > 1 else path.stem
        if here in {"__main__", "__init__"}:
            continue  # ``python -m tgi_cli`` is the command; the package names its API, lazily
        for name in imported_names(path):
            if not name.startswith("tgi_cli."):
                continue
            there = room_of(name)
            if there == here or there not in {*ROOMS, *SIDE_ROOMS}:
                continue
            below = here in ROOMS and (
                there in SIDE_ROOMS or ROOMS.index(there) > ROOMS.index(here)
            )
            if not below:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "place",
    [
        "bench",
        "engine",
        "router",
        "offline",
        "text",
        "rpc",
        "launcher",
        "cli",
        "hub",
        "config",
        "sampling/params.py",
    ],
)
def test_these_know_no_tensors(place: str) -> None:
    root = PACKAGE / place
    files = [root] if root.is_file() else [p for p in modules() if p.is_relative_to(root)]
    assert files
    # The converter of pickled checkpoints runs in a child process of its own.
    children = {PACKAGE / "hub" / "convert.py"}
    for path in set(files) - children:
        names = {name.split(".")[0] for name in imported_names(path)}
        assert "torch" not in names, path


def test_the_engine_knows_no_wire_and_no_text() -> None:
    for path in modules():
        if path.is_relative_to(PACKAGE / "engine"):
            names = {name.split(".")[0] for name in imported_names(path)}
            assert not names & {"grpc", "starlette", "tokenizers", "transformers", "httpx"}, path


def test_the_worker_knows_only_the_contracts_of_the_engine() -> None:
    for path in modules():
        if path.is_relative_to(PACKAGE / "worker"):
            engine = {n for n in imported_names(path) if n.startswith("tgi_cli.engine.")}
            stems = {name.split(".")[2] for name in engine}
            assert stems <= {"step", "messages"}, path


OWN_FILES = (
    "files.py",  # reads them all within bounds
    "demo/",  # ours
    "device/",  # /proc, /sys
    "kernels/",
    "bench/machine.py",
    "bench/managed_server.py",
    "cli/machine.py",
    "cli/reference.py",
    "launcher/oom.py",  # the kernel's counters
    "router/api/docs.py",
    "worker/sizing/memory.py",
    "quantize/activations.py",
    "quantize/calibration.py",  # of texts of any length the beginning
    "quantize/tensors.py",
    "hub/headers.py",  # 100 MB at most
    "hub/resolve.py",  # a checksum
    "hub/transfer.py",
)
"""Read or write what this package or the system has written, or with a bound of their own."""


def test_files_of_others_are_read_within_bounds_alone() -> None:
    """A checkpoint, an adapter, a configuration file may be a device, a pipe or without an end."""
    wrong = []
    for path in modules():
        name, source = path.relative_to(PACKAGE).as_posix(), path.read_text()
        if not name.startswith(OWN_FILES):
            calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
            found = [call for call in calls if _reads_a_file(call, "require_file(" in source)]
            wrong += [f"{name}:{call.lineno} {ast.unparse(call.func)}" for call in found]
    assert not wrong, "\n".join(wrong)


def _reads_a_file(call: ast.Call, checked: bool) -> bool:
    """Whether a call reads a file whose kind and size nothing has ``checked``."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "open"
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    words = [a.value for a in call.args if isinstance(a, ast.Constant)]
    if function.attr == "open":  # of a path: with keywords alone, or with a mode to read
        reads = any(isinstance(word, str) and word.strip("bt") == "r" for word in words)
        return owner != "os" and (reads or not call.args)
    if function.attr in ("read_text", "read_bytes"):
        return not call.args and owner != "worker"
    if function.attr in ("load", "safe_load"):
        return owner in ("json", "yaml")
    return function.attr == "from_file" and not checked


def test_files_can_be_read_in_a_sitting() -> None:
    long = {
        str(path.relative_to(PACKAGE)): lines
        for path in modules()
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from tgi_cli.cli.main import main\n"
        "try:\n"
        f"    sys.argv = ['tgi', *{arguments!r}]\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'transformers', 'httpx', 'huggingface_hub', 'grpc', 'numpy'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []", done.stdout + done.stderr


def test_a_launcher_imports_nothing_that_its_children_serve_with() -> None:
    program = (
        "import sys\n"
        "import tgi_cli.launcher.serve as launcher\n"
        "launcher.serve = lambda config, options: 0\n"
        "from tgi_cli.cli.main import run\n"
        "assert run(['serve', 'org/model', '--port=80', '--cuda-graphs=1,2', '--api-key=k']) == 0\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'httpx', 'huggingface_hub', 'grpc',\n"
        "    'google.protobuf', 'numpy', 'starlette', 'uvicorn', 'asyncio', 'pydantic', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"
