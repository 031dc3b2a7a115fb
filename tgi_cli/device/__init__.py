"""Facts of the devices: memory, threads, supported dtypes."""

from tgi_cli.device.facts import describe
from tgi_cli.device.memory import available_memory, peak_memory, total_memory
from tgi_cli.device.threads import default_threads, set_threads

__all__ = [
    "available_memory",
    "default_threads",
    "describe",
    "peak_memory",
    "set_threads",
    "total_memory",
]
