"""Benchmarks of servers: workloads, drivers, statistics, saved runs, their comparison, the screen.

Nothing of it is imported by what serves. The screen (``bench/dashboard``) needs the extra ``bench``;
all else does not.
"""
