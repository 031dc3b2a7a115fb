"""OpenTelemetry: what the processes of a server share to send traces and metrics."""
