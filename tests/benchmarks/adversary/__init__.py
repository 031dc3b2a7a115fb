"""What the worst request, checkpoint and flag cost.

``python -m tests.benchmarks.adversary``
"""
