"""The routes, one module per API. Each has ``ROUTES``."""
