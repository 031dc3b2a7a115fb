"""Workloads: what is sent, and when. Everything is drawn from a seed.

    lengths = LengthDistribution.parse("lognormal:512,128")
    spec = SyntheticWorkload(prompt=lengths, output=LengthDistribution.parse("64"))
    arrivals = ArrivalProcess.parse("poisson")
    requests = scheduled(synthetic(tokenizer, spec, seed=1), arrivals.times(rate=4.0, seed=1))

All iterators are lazy, and endless unless their file ends. Build another one with the same seed to
repeat its prompts, or with a seed of its own for each step to avoid hits in a prefix cache.
"""
