"""torch without modules that serving does not use: they are imported on their first use."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tgi_cli.process import minimal_torch
from tgi_cli.process.minimal_torch import import_minimal_torch

pytestmark = pytest.mark.skipif(
    any(Path(device).exists() for device in minimal_torch._GPU_DEVICES)
    or not version("torch").startswith(minimal_torch._VERSION),
    reason="torch is imported whole beside GPUs, and in other versions",
)

BEGIN = """
import sys
from tgi_cli.process.minimal_torch import complete_torch, import_minimal_torch

import_minimal_torch()
import torch
"""

USES = {
    "nothing is loaded at first": """
loaded = {"torch.distributions.kl", "torch.optim.adam", "torch.ao.nn", "torch._prims",
          "torch.export.unflatten", "torch.profiler.profiler", "torch.utils.data.dataloader"}
assert not loaded & set(sys.modules)
""",
    "a generator": """
generator = torch.Generator().manual_seed(1)
first = torch.rand(2, generator=generator)
import torch._prims.rng_prims
assert torch.equal(torch.rand(2, generator=torch.Generator().manual_seed(1)), first)
assert isinstance(generator, torch.Generator)
""",
    "an attribute": """
weights = torch.nn.Parameter(torch.ones(2))
weights.sum().backward()
assert "torch.distributions.kl" not in sys.modules
torch.optim.SGD([weights], lr=0.5).step()  # imports torch._dynamo, and with it all
assert weights.tolist() == [0.5, 0.5]
assert sys.modules["torch.optim"] is torch.optim
assert "torch.distributions.kl" in sys.modules
""",
    "attributes that are missing": """
for package in torch, torch.nn, torch.utils, torch.optim:
    try:
        package.no_such_name
    except AttributeError as error:
        assert str(error) == f"module {package.__name__!r} has no attribute 'no_such_name'", error
    else:
        raise AssertionError
""",
    "no empty module is left": """
import gc
from types import ModuleType
from tgi_cli.process.minimal_torch import _UNUSED

names = {f"{package}.{name}" for package, unused in _UNUSED.items() for name in unused}
modules = [each for each in gc.get_objects() if type(each) is ModuleType]
assert len(modules) > 500
assert not names & {each.__name__ for each in modules}
""",
    "a name": """
from torch.distributions import Normal
assert Normal(0.0, 1.0).log_prob(torch.zeros(())).item() < 0
""",
    "all names": """
from torch.nn.quantized import *
assert Linear is torch.ao.nn.quantized.Linear
""",
    "a submodule": """
import torch.utils.data.dataset
assert torch.utils.data.DataLoader(range(4), batch_size=4).__iter__().__next__().sum() == 6
""",
    "a list of names": """
assert "as_masked_tensor" in dir(torch.masked)
""",
    "the module of a function": """
import inspect
code = torch.nn.Linear.forward.__code__
assert inspect.getmodule(code) is torch.nn.modules.linear  # looks at all modules
assert "torch.optim.adam" not in sys.modules
""",
    "operators for the meta device": """
scores = torch.empty(2, 3, device="meta")
assert (scores + 1).sum(-1).view(1, 2).shape == (1, 2)
order = torch.empty(5, dtype=torch.int64, device="meta")
try:
    scores.index_select(1, order)
except NotImplementedError:
    pass
else:
    raise AssertionError("an operator without a shape in C++ works: nothing was left out")
import tgi_cli.models.hf
assert scores.index_select(1, order).shape == (2, 5)
""",
    "compilation": """
compiled = torch.compile(lambda x: x.index_select(0, torch.tensor([1])) + 1, backend="aot_eager")
assert compiled(torch.ones(2)).tolist() == [2.0]
""",
    "tracing": """
class Twice(torch.nn.Module):
    def forward(self, x):
        return x * 2

assert torch.fx.symbolic_trace(Twice())(torch.ones(1)).item() == 2
assert torch.jit.trace(Twice(), torch.ones(1))(torch.ones(1)).item() == 2
assert torch.jit.script(torch.nn.ReLU())(torch.ones(1)).item() == 1
assert torch.func.vmap(lambda x: x * 2)(torch.ones(2)).sum() == 4
""",
    "exporting": """
class Twice(torch.nn.Module):
    def forward(self, x):
        return x * 2

assert torch.export.export(Twice(), (torch.ones(1),)).module()(torch.ones(1)).item() == 2
""",
    "profiling": """
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    torch.ones(2) + 1
assert profile.key_averages()
""",
    "quantization": """
import warnings
warnings.simplefilter("ignore")
layers = torch.nn.Sequential(torch.nn.Linear(4, 4))
quantized = torch.quantization.quantize_dynamic(layers, {torch.nn.Linear}, dtype=torch.qint8)
assert type(quantized[0]) is torch.nn.quantized.dynamic.Linear
""",
    "comparison": """
torch.testing.assert_close(torch.ones(2), torch.ones(2))
""",
    "everything": """
complete_torch()
from tgi_cli.process import minimal_torch
for package, modules in minimal_torch._UNUSED.items():
    for name in modules:
        module = vars(sys.modules[package])[name]
        assert module is sys.modules[f"{package}.{name}"]
        assert module.__spec__ is not None
assert "torch._prims.rng_prims" in sys.modules
complete_torch()
""",
    "threads": """
import threading
from concurrent.futures import ThreadPoolExecutor

barrier = threading.Barrier(8)
sys.setswitchinterval(1e-5)

def use(number):
    barrier.wait()
    if number % 4 == 0:
        complete_torch()
    if number % 4 == 1:
        from torch.utils.data import DataLoader
    if number % 4 == 2:
        torch.profiler.profile  # imports part of torch.optim
    return torch.optim.Adam, torch.utils.data.DataLoader, torch.distributions.Normal

with ThreadPoolExecutor(8) as threads:
    assert len(set(threads.map(use, range(8)))) == 1
""",
}


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("use", USES)
def test_what_is_left_out_works_when_it_is_used(use: str) -> None:
    run(BEGIN + USES[use])


WHOLE = """
import sys
from tgi_cli.process import minimal_torch

minimal_torch.{changed}
minimal_torch.import_minimal_torch()
assert "torch._prims.rng_prims" in sys.modules
assert "torch.optim.adam" in sys.modules
minimal_torch.complete_torch()
"""


@pytest.mark.parametrize("changed", ["_VERSION = '2.12.'", "_GPU_DEVICES = ('/dev/null',)"])
def test_torch_is_imported_whole(changed: str) -> None:
    run(WHOLE.format(changed=changed))


def test_an_imported_torch_stays_as_it_is() -> None:
    import torch

    import_minimal_torch()
    assert sys.modules["torch._meta_registrations"] is torch._meta_registrations
