"""The HTTP face: routes and schemas, validation, errors, streaming, metrics. Knows no tensors."""
