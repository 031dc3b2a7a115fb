"""Calls of a module that run a few layers at a time, or for a limited time.

The module's own code runs unchanged, on a thread that pauses at layers until it is resumed, so that
the result does not depend on the pauses. With a time limit, it also pauses within layers: between
torch's operations, and at points that the module offers within long ones. Resuming takes about 20
us on one server core, as the two threads wake each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tgi_cli.models.vision import PausePoints


class _BetweenOperations(TorchFunctionMode):
    """Lets a thread's calls of torch pause after each operation.

    https://docs.pytorch.org/docs/stable/notes/extending.html#extending-all-torch-api-with-modes
    """

    def __init__(self, pauses: PausePoints) -> None:
        super().__init__()
        self._pauses = pauses

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._pauses()
        return result


class _Cancelled(BaseException):
    """Unwinds a call whose result is no longer needed."""


class PausedCalls:
    """Runs one call at a time, from layer to layer. Use it from one thread.

    Args:
        layers: modules that the calls pass.
        device: of the modules. The calls use the stream that is current where they are resumed.
        threads: of torch on a CPU; None for as many as new threads have.
        pauses: points within the layers.

    Attributes:
        layers_begun: of the last call.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        device: torch.device,
        threads: int | None = None,
        pauses: PausePoints | None = None,
    ) -> None:
        self._device = device
        self._threads = threads
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._resumed = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self.layers_begun = 0
        self._pauses = PausePoints() if pauses is None else pauses
        self._left: int | None = 0
        self._deadline = self._checked = 0.0
        self._longest = self._longest_before = 0.0
        """Time between two points, of the slice that runs and of the one before."""
        self._cancelled = False
        self._stream: Any = None
        self._result: object = None
        self._error: Exception | None = None
        self._hooks = [layer.register_forward_pre_hook(self._pause) for layer in layers]
        self._thread = threading.Thread(target=self._run, name="image encoder", daemon=True)
        self._running = False
        self._started = False

    @property
    def is_running(self) -> bool:
        """Whether a call was started that has not ended."""
        return self._running

    def start(self, call: Callable[[], object]) -> None:
        """Begin a call; nothing of it runs before :meth:`resume`.

        Raises:
            RuntimeError: another call is running.
        """
        if self._running:
            raise RuntimeError("a call is running")
        if not self._started:
            self._thread.start()
            self._started = True
        self._running = True
        self._cancelled = False
        self._result = self._error = None
        self.layers_begun = 0
        self._jobs.put(call)

    def resume(self, layers: int | None) -> bool:
        """Run the call up to the layer after the next ``layers``, or to its end.

        Returns:
            Whether it has ended, so that :meth:`result` has its outcome.
        """
        if not self._running:
            raise RuntimeError("no call is running")
        self._left = layers
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        self._resumed.release()
        self._stopped.acquire()
        return not self._running

    def resume_for(self, seconds: float) -> bool:
        """Run the call for about ``seconds``, at least to the next point at which it can stop.

        It stops where the next part would end too late if it took as long as the longest recent
        one.

        Returns:
            As :meth:`resume`.
        """
        self._checked = time.perf_counter()
        self._deadline = self._checked + seconds
        self._longest, self._longest_before = 0.0, self._longest
        self._pauses.check = self._check
        try:
            return self.resume(None)
        finally:
            self._pauses.check = None

    def result(self) -> object:
        """What the last call returned. Raises what it raised."""
        result, error = self._result, self._error
        self._result = self._error = None  # with the tensors that its frames hold
        if error is not None:
            raise error
        return result

    def cancel(self) -> None:
        """Unwind the call that is running, if any."""
        if self._running:
            self._cancelled = True
            self.resume(0)

    def close(self) -> None:
        """End the thread. May be called twice."""
        self.cancel()
        for hook in self._hooks:
            hook.remove()
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    # ------------------------------------------------------------------ its thread

    def _run(self) -> None:
        if self._threads is not None and self._device.type == "cpu":
            torch.set_num_threads(self._threads)  # of this thread alone
        while (call := self._jobs.get()) is not None:
            self._resumed.acquire()
            try:
                if not self._cancelled:
                    self._result = self._call(call)
            except _Cancelled:
                pass
            except Exception as error:  # a model's code may raise anything: the caller handles it
                self._error = error.with_traceback(None)  # its frames hold activations
            del call
            self._running = False
            self._stopped.release()

    @torch.inference_mode()
    def _call(self, call: Callable[[], object]) -> object:
        if self._stream is None:
            with _BetweenOperations(self._pauses):
                return call()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return call()

    def _pause(self, _module: nn.Module, _inputs: object) -> None:
        if threading.current_thread() is not self._thread:
            return
        self._pauses()
        if self._left is not None:
            if not self._left:
                self._stop()
            if self._left is not None:
                self._left -= 1
        self.layers_begun += 1

    def _check(self) -> None:
        """Stop if the time is up."""
        if threading.current_thread() is not self._thread:
            return
        now = time.perf_counter()
        self._longest = max(self._longest, now - self._checked)
        self._checked = now
        if now + max(self._longest, self._longest_before) > self._deadline:
            self._stop()

    def _stop(self) -> None:
        self._stopped.release()
        self._resumed.acquire()
        if self._cancelled:
            raise _Cancelled
