"""Cost of the worst request, checkpoint and flag that the server accepts.

``python -m tests.benchmarks.adversary``
"""
