"""Architecture rules: order of packages, imports, file sizes, reading of untrusted files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tgi_cli

PACKAGE = Path(tgi_cli.__file__).parent

# A package imports only from packages below it. The engine stands below the worker because it owns
# their contract (engine/step.py); it knows a worker only as a protocol.
PACKAGES = [
    "cli",
    "multi_model",
    "ray_serve",
    "launcher",
    "deploy",
    "bench",
    "chat",
    "router",
    "llm",
    "quantize",
    "tgi_grpc",
    "vision",
    "text",
    "model_server",
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
SIDE_PACKAGES = {"hub", "demo"}
"""Any package of the stack may import them; they import only the foundation."""
FOUNDATION = {
    *("process", "config", "gguf", "telemetry"),
    *("byte_level", "errors", "files", "logging", "patterns", "version"),
    "__init__",
}
"""Any package may import them."""
PROCESS_MAY_IMPORT = {"process", "errors", "files", "logging"}

MAX_LINES = 400
GENERATED = "_pb2.py"


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


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_folder_has_a_rank() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    ground = {"config", "gguf", "process", "telemetry"}
    assert folders == {*PACKAGES, *SIDE_PACKAGES, *ground}


def may_import(importer: str, imported: str) -> bool:
    """Whether a file of the package ``importer`` may import from the package ``imported``."""
    if importer == imported:
        return True
    if importer == "process":
        return imported in PROCESS_MAY_IMPORT
    if imported in FOUNDATION:
        return True
    if importer not in PACKAGES:
        return False
    return imported in SIDE_PACKAGES or PACKAGES.index(imported) > PACKAGES.index(importer)


def test_packages_import_only_from_below() -> None:
    wrong = []
    for path in modules():
        parts = path.relative_to(PACKAGE).parts
        here = parts[0] if len(parts) > 1 else path.stem
        if here in {"__main__", "__init__"}:
            continue  # ``python -m tgi_cli`` is the command; the package names its API, lazily
        for name in imported_names(path):
            there = package_of(name)
            known = {*PACKAGES, *SIDE_PACKAGES, *FOUNDATION}
            if name.startswith("tgi_cli.") and there in known and not may_import(here, there):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_package_imports_a_private_name_of_another_module() -> None:
    wrong = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tgi_cli"):
                names = [alias.name for alias in node.names]
                private = [n for n in names if n.startswith("_") and not n.startswith("__")]
                wrong += [f"{path.relative_to(PACKAGE)}: {node.module}.{n}" for n in private]
    assert not wrong, "\n".join(wrong)


def imported_modules() -> dict[str, set[str]]:
    """For each module the modules of this package that it imports, anywhere in it."""
    paths = {}
    for path in modules():
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        paths[".".join(parts).removesuffix(".__init__")] = path
    graph = {}
    for module, path in paths.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    found.add(name if name in paths else node.module)
        graph[module] = found & set(paths) - {module}
    return graph


def test_modules_import_each_other_in_one_direction_only() -> None:
    graph = imported_modules()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    "package",
    [
        "bench",
        "chat",
        "engine",
        "router",
        "llm",
        "tgi_grpc",
        "vision",
        "text",
        "model_server",
        "rpc",
        "launcher",
        "ray_serve",
        "deploy",
        "cli",
        "hub",
        "config",
        "gguf",
        "process",
        "telemetry",
        "sampling/params.py",
    ],
)
def test_packages_outside_the_worker_do_not_import_torch(package: str) -> None:
    root = PACKAGE / package
    files = [root] if root.is_file() else [p for p in modules() if p.is_relative_to(root)]
    assert files
    # These run as child processes.
    children = {PACKAGE / "hub" / "convert.py", PACKAGE / "hub" / "merge_lora.py"}
    for path in set(files) - children:
        names = {name.split(".")[0] for name in imported_names(path)}
        assert "torch" not in names, path


def test_the_engine_imports_no_protocol_and_no_tokenizer() -> None:
    for path in modules():
        if path.is_relative_to(PACKAGE / "engine"):
            names = {name.split(".")[0] for name in imported_names(path)}
            assert not names & {"grpc", "starlette", "tokenizers", "transformers", "httpx"}, path


def test_the_worker_imports_only_the_contracts_of_the_engine() -> None:
    for path in modules():
        if path.is_relative_to(PACKAGE / "worker"):
            engine = {n for n in imported_names(path) if n.startswith("tgi_cli.engine.")}
            stems = {name.split(".")[2] for name in engine}
            assert stems <= {"step", "image_slices", "messages"}, path


OWN_FILES = (
    "models/tensor_readers.py",  # whose headers were checked, with the files' sizes
    "files.py",  # reads them all within bounds
    "gguf/reader.py",  # headers, within bounds of its own
    "gguf/config_parts.py",  # small tensors, whose places the headers' check has bounded
    "demo/",  # ours
    "device/",  # /proc, /sys
    "kernels/",
    "process/managed_server.py",
    "bench/token_counter.py",
    "cli/reference.py",
    "process/cores.py",  # /proc, /sys
    "process/machine.py",  # /proc
    "process/resident_memory.py",  # likewise
    "process/proportional_memory.py",  # likewise
    "process/system_memory.py",  # likewise, and control groups
    "launcher/oom.py",  # the kernel's counters
    "router/api/docs.py",
    "router/api/web_ui.py",
    "worker/sizing/memory.py",
    "worker/tensor_parallel/node_identity.py",  # of files of any length two parts
    "quantize/block_runner.py",
    "quantize/calibration.py",  # of texts of any length the beginning
    "quantize/checkpoint_writer.py",
    "hub/safetensors_header.py",  # 100 MB at most
    "hub/resolve.py",  # a checksum
    "hub/download.py",
    "hub/transfers.py",
)
"""Read or write what this package or the system has written, or with a bound of their own."""


def test_untrusted_files_are_read_within_bounds() -> None:
    """A checkpoint, an adapter, a configuration file may be a device, a pipe or without an end."""
    wrong = []
    for path in modules():
        name, source = path.relative_to(PACKAGE).as_posix(), path.read_text()
        if not name.startswith(OWN_FILES):
            calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
            checked = "require_file(" in source or "require_tokenizer(" in source
            found = [call for call in calls if _reads_a_file(call, checked)]
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


def test_no_file_is_longer_than_400_lines() -> None:
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


def test_the_launcher_imports_no_serving_dependencies() -> None:
    program = (
        "import sys\n"
        "import tgi_cli.launcher.serve as launcher\n"
        "launcher.serve = lambda *_: 0\n"
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
