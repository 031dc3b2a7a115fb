"""Launches of Triton kernels at a fraction of the host time that Triton's own dispatch takes.

``JITFunction.run`` binds the arguments, computes a specialization for each of them and makes a
string of all that, before it looks for the compiled kernel: 20 to 70 us a launch
(``python -m tests.benchmarks.gpu.host``). Of a layer outside of CUDA graphs that is more than what
the GPU computes. A function that is generated for each kernel makes a tuple of the same facts, and
calls the compiled kernel's launcher: 3 to 6 us. What it has not seen goes to Triton as ever.

Keys say at least what Triton's say (https://github.com/triton-lang/triton, runtime/jit.py): the
dtype of a pointer and whether it is a multiple of 16; of an integer whether it is 1, a multiple of
16, and of 32 bits; constants and options as they are. A finer key only means that Triton is asked
once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from triton.runtime import driver
from triton.runtime.jit import JITFunction

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")
"""Launch options that a call may have, each with None for Triton's default."""

_OF_ALL = {"enable_fp_fusion": True}
"""Options of every launch. Where a launch does not say, Triton fuses a product and a sum up to 3.9
(which warns), and does not from 3.10 on: results and speed are to be the same under all."""

_INTEGERS, _FLOATS = ("int", "i32"), ("float", "fp32")
"""How Triton spells the annotations of numbers."""

_MAX_LAUNCHES = 4096
"""Limit of the launches that a kernel remembers; beyond it, all are forgotten."""


def cached_launches(kernel: Any) -> Any:
    """A decorator above ``@triton.jit``: ``kernel[grid](...)`` remembers what it has launched.

    For kernels that the host launches, with every parameter annotated as ``tl.tensor`` (a tensor),
    ``tl.constexpr``, ``int`` or ``float``. Interpreted kernels stay as they are.

    After the first launch of a variant, pointers reach the launcher as integers, so that it no
    longer checks that they are the device's. Launch hooks (Proton's) are not called.

    Raises:
        TypeError: a parameter is annotated otherwise.
    """
    return CachedKernel(kernel) if isinstance(kernel, JITFunction) else kernel


class CachedKernel:
    """A kernel that is launched by ``kernel[grid](...)``; other attributes are Triton's kernel's.

    Attributes:
        kernel: Triton's.
        launches: launcher, function and metadata of compiled kernels, by key.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
        self._launch = _generate(kernel, self.launches, self._dispatch)
        self._integers = [
            parameter.num for parameter in kernel.params if parameter.annotation in _INTEGERS
        ]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(self._launch, grid)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def _dispatch(
        self,
        key: tuple[Any, ...] | None,
        grid: Any,
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> None:
        """Launch by Triton, and remember what it has launched, if there is a key."""
        given = {name: value for name, value in options.items() if value is not None} | _OF_ALL
        compiled = self.kernel[grid](*arguments, **given)
        # True == 1, but Triton makes another type of it.
        if key is None or any(isinstance(arguments[number], bool) for number in self._integers):
            return
        run = getattr(compiled, "run", None)  # None where it was only compiled
        if run is not None:
            if len(self.launches) >= _MAX_LAUNCHES:
                self.launches.clear()
            self.launches[key] = run, compiled.function, compiled.packed_metadata


def _generate(
    kernel: Any,
    launches: dict[tuple[Any, ...], tuple[Any, Any, Any]],
    dispatch: Callable[..., None],
) -> Callable[..., None]:
    """A function with the kernel's parameters, and what a launch costs in it.

    Python binds the arguments as it calls it, and everything is a local variable: a loop over the
    parameters would take several times as long. Names that begin with an underscore are not the
    kernel's.
    """
    loads, facts, passed = [], ["_device"], []
    for parameter in kernel.params:
        name, kind = parameter.name, parameter.annotation
        specialized = not parameter.do_not_specialize
        if name.startswith("_"):
            raise TypeError(f"{kernel.__name__}: {name} begins with an underscore")
        if parameter.is_constexpr:
            facts.append(name)
            passed.append(name)
        elif kind == "tensor":
            loads.append(f"_at_{name} = {name}.data_ptr()")
            facts.append(f"{name}.dtype")
            if specialized and not parameter.do_not_specialize_on_alignment:
                facts.append(f"not _at_{name} & 15")
            passed.append(f"_at_{name}")
        elif kind in _INTEGERS:
            facts.append(f"-0x80000000 <= {name} < 0x80000000")
            if specialized:
                facts.append(f"{name} == 1")
                if not parameter.do_not_specialize_on_alignment:
                    facts.append(f"not {name} & 15")
            passed.append(name)
        elif kind in _FLOATS:
            facts.append(f"{name}.__class__")
            passed.append(name)
        else:
            raise TypeError(f"{kernel.__name__}: {name} is annotated as {kind!r}")
    names = [parameter.name for parameter in kernel.params]
    defaults = {
        f"_default_{parameter.name}": parameter.default
        for parameter in kernel.params
        if parameter.has_default
    }
    parameters = [
        f"{name}=_default_{name}" if f"_default_{name}" in defaults else name for name in names
    ]
    body = "\n        ".join([*loads, f"_key = ({', '.join([*facts, *_OPTIONS])},)"])
    source = f"""
def launch(_grid, {", ".join(parameters)}, {", ".join(f"{name}=None" for name in _OPTIONS)}):
    _active = _driver.active
    _device = _active.get_current_device()
    _found = _key = None
    try:
        {body}
        _found = _launches.get(_key)
    except (AttributeError, TypeError):
        _key = None  # None in place of a tensor: Triton knows what to do
    if _found is None or _grid.__class__ is not tuple:
        _options = dict({", ".join(f"{name}={name}" for name in _OPTIONS)})
        return _dispatch(_key, _grid, ({", ".join(names)},), _options)
    _run, _function, _metadata = _found
    _x, _y, _z = _grid if len(_grid) == 3 else (*_grid, 1, 1)[:3]
    _stream = _active.get_current_stream(_device)
    _run(_x, _y, _z, _stream, _function, _metadata, None, None, None, {", ".join(passed)})
"""
    namespace = {"_driver": driver, "_launches": launches, "_dispatch": dispatch, **defaults}
    exec(compile(source, f"<launch of {kernel.__name__}>", "exec"), namespace)
    launch: Callable[..., None] = namespace["launch"]
    return launch
