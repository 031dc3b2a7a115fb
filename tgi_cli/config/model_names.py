"""Names of models in requests."""

BASE_NAME = "tgi"
"""The name of the served model for TGI's clients, whatever the model is."""
