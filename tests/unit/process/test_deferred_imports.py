"""Modules are executed once something of them is used, and are then like any others."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tgi_cli.process.deferred_imports import TORCH_PARTS


def run(code: str, folder: Path | None = None) -> list[str]:
    """The lines that a program prints, whose modules may be in a folder."""
    program = "from tgi_cli.process.deferred_imports import defer, execute_deferred\n"
    program += textwrap.dedent(code)
    if folder is not None:
        program = f"import sys\nsys.path.insert(0, {str(folder)!r})\n{program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A package of modules that say when they are executed."""
    package = tmp_path / "pack"
    (package / "sub").mkdir(parents=True)
    files = {
        "__init__.py": "from pack import first, second\nimport pack.first\n",
        "first.py": "print('first')\nvalue = 1\nfrom pack import second\nother = second.value\n",
        "second.py": "print('second')\nvalue = 2\n",
        "sub/__init__.py": "print('sub')\nvalue = 3\n",
        "sub/deep.py": "print('deep')\n",
        "broken.py": "raise ValueError('broken')\n",
        "user.py": "print('user')\n",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    return tmp_path


def test_a_module_is_executed_with_the_first_use(modules: Path) -> None:
    code = """
    defer(["pack.first"])
    import pack, pack.first
    from pack import first
    print("imported", hasattr(first, "__file__"), first.__name__)
    print(pack.first.value, first.other, type(first).__name__)
    """
    expected = ["second", "imported True pack.first", "first", "1 2 module"]
    assert run(code, modules) == expected


def test_those_that_use_each_other(modules: Path) -> None:
    code = """
    defer(["pack.first", "pack.second"])
    import pack
    print("imported")
    print(pack.first.other)
    """
    assert run(code, modules) == ["imported", "first", "second", "2"]


def test_a_package_is_executed_before_its_parts(modules: Path) -> None:
    code = """
    defer(["pack.sub"])
    import pack.sub
    print("imported")
    import pack.sub.deep
    """
    assert run(code, modules)[-3:] == ["imported", "sub", "deep"]


def test_all_are_executed_before_those_that_rely_on_them(modules: Path) -> None:
    code = """
    defer(["pack.first", "pack.second"], ["pack.user"])
    import pack
    import pack.user
    """
    assert run(code, modules) == ["first", "second", "user"]


def test_errors_are_those_of_an_import(modules: Path) -> None:
    code = """
    defer(["pack.broken", "pack.second"])
    import pack, pack.broken
    for name in ("value", "value"):
        try:
            pack.broken.value
        except (ValueError, AttributeError) as error:
            print(type(error).__name__)
    try:
        pack.second.missing
    except AttributeError as error:
        print(error)
    """
    lines = run(code, modules)
    assert lines[-3:] == [
        "ValueError",
        "AttributeError",
        "module 'pack.second' has no attribute 'missing'",
    ]


def test_what_has_been_imported_is_left_alone(modules: Path) -> None:
    code = """
    import pack
    defer(["pack.first"])
    import pack.first
    execute_deferred()
    """
    assert run(code, modules) == ["first", "second"]


def test_threads_wait_for_a_module_that_another_one_executes(modules: Path) -> None:
    (modules / "slow.py").write_text("import time\ntime.sleep(0.2)\nvalue = 4\n")
    code = """
    from concurrent.futures import ThreadPoolExecutor
    defer(["slow"])
    import slow
    with ThreadPoolExecutor(4) as pool:
        print(set(pool.map(lambda _: slow.value, range(4))))
    """
    assert run(code, modules)[-1] == "{4}"


def test_torch_works_without_the_deferred_parts_and_with_them() -> None:
    code = f"""
    import sys
    parts = {TORCH_PARTS!r}
    defer(parts)
    import torch
    left = [name for name in parts if type(sys.modules[name]).__name__ == "_DeferredModule"]
    print(left == list(parts))
    with torch.inference_mode():
        layer = torch.nn.Linear(4, 4, device="meta")
        print(layer(torch.empty(2, 4, device="meta")).shape)
        print(torch.arange(6.0).reshape(2, 3).softmax(1).argmax(1).tolist())
    execute_deferred()
    print(torch.distributions.Normal(0.0, 1.0).mean.item())
    """
    assert run(code) == ["True", "torch.Size([2, 4])", "[2, 2]", "0.0"]


def test_the_processes_of_a_model_import_torch_after_they_have_deferred_parts_of_it() -> None:
    code = """
    import sys
    import tgi_cli.cli.model_server, tgi_cli.model_server.main
    import tgi_cli.worker.tensor_parallel.main
    import tgi_cli.tgi_grpc.mount, tgi_cli.tgi_grpc.requests
    print("torch" in sys.modules)
    """
    assert run(code) == ["False"]
