import builtins
import subprocess
import sys

import msgspec
import pytest

from tests.unit.bench.dashboard.cells import of_picture
from tests.unit.bench.dashboard.script import batch_run, http_run
from tgi_cli.bench import dashboard
from tgi_cli.errors import ConfigError
from tgi_cli.process.installation import install_command


def test_the_title_of_a_saved_run() -> None:
    assert dashboard.ScreenTitle.of(batch_run()).details == (
        "Sequence Length: 10",
        "Decode Length: 8",
    )
    assert dashboard.ScreenTitle.of(http_run()).details == ("tgi http://127.0.0.1:3000",)
    workload = {"load": "rate", "input_tokens": "256", "output_tokens": "uniform:64,128"}
    loaded = msgspec.structs.replace(http_run(), workload=workload)
    assert dashboard.ScreenTitle.of(loaded).details == (
        "Input Length: 256",
        "Output Length: uniform:64,128",
        "tgi http://127.0.0.1:3000",
    )


def test_a_picture_needs_no_terminal() -> None:
    lines = of_picture(dashboard.picture(batch_run(), first="percentiles", width=100, height=30))
    assert len(lines) == 30
    assert any("Decode (token)" in line or "Decode" in line for line in lines)


def test_without_a_terminal_the_error_has_a_remedy_and_textual_is_not_imported() -> None:
    code = (
        "import sys\n"
        "from tgi_cli.bench.dashboard import view\n"
        "print('textual' in sys.modules)\n"
        "from tests.unit.bench.dashboard.script import batch_run\n"
        "from tgi_cli.errors import ConfigError\n"
        "try: view(batch_run())\n"
        "except ConfigError as error: print(error.remedy)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\nuse --ui plain\n"


def test_without_textual_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: object, **others: object) -> object:
        if name.startswith("tgi_cli.bench.dashboard.app"):
            raise ModuleNotFoundError("No module named 'textual'", name="textual")
        return real(name, *rest, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError) as raised:
        dashboard.watch("http://127.0.0.1:1")
    assert install_command("bench") in raised.value.remedy
