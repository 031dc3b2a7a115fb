"""Benchmarks of servers: workloads, drivers, statistics, saved runs, their comparison, the screen.

No server process imports it. Only the dashboard (``bench/dashboard``) needs the extra ``bench``.
"""
