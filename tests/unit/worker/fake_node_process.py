"""A process of another node without a model, as :mod:`tests.unit.worker.fake_shard` behaves."""

from __future__ import annotations

import sys

from tests.unit.worker.fake_shard import behave
from tgi_cli.process.spawn import read_config
from tgi_cli.worker.tensor_parallel.process_link import ProcessLink

if __name__ == "__main__":
    link = read_config(int(sys.argv[2]), ProcessLink)
    behave(sys.argv[1], link.process, link.connect("commands"), link.connect("events"))
