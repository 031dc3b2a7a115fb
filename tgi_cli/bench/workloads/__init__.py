"""What is sent, and when. Everything here is drawn from a seed: the same one, the same requests.

    lengths = Lengths.parse("lognormal:512,128")
    requests = synthetic(tokenizer, Synthetic(prompt=lengths, output=Lengths.parse("64")), seed=1)
    requests = scheduled(requests, Arrivals.parse("poisson").times(rate=4.0, seed=1))

All of these are endless or as long as their file, and lazy: take what a step needs. A sweep that
wants the same prompts for every step builds them anew with the same seed; one that wants no prompt
twice (prefix caches) gives each step a seed of its own.
"""

from tgi_cli.bench.workloads.distributions import ArrivalProcess, LengthDistribution, scheduled
from tgi_cli.bench.workloads.files import file_prompts, sharegpt
from tgi_cli.bench.workloads.synthetic import (
    ConversationWorkload,
    SyntheticWorkload,
    conversations,
    synthetic,
)
from tgi_cli.bench.workloads.traces import trace

__all__ = [
    "ArrivalProcess",
    "ConversationWorkload",
    "LengthDistribution",
    "SyntheticWorkload",
    "conversations",
    "file_prompts",
    "scheduled",
    "sharegpt",
    "synthetic",
    "trace",
]
