"""Benchmarks: workloads, load generators, statistics, saved runs, comparison, reports, dashboard.

No server process imports it. Only the dashboard (``bench/dashboard``) needs the extra ``bench``.
"""
