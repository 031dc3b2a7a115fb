"""From records to metrics: latencies, throughput, goodput, and their confidence intervals.

``metrics.step_metrics`` computes all metrics of one step; the other functions are for screens that
draw while a step runs (``intervals=False`` is cheap enough for several calls per second). Latencies
are in milliseconds, rates per second. Requests and batches marked ``warmup`` never count.
``observations.METRICS`` defines each metric.
"""
