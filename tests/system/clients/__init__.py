"""Scripts that drive clients, each run by the Python of an environment that has its client."""
