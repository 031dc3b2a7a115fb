"""OpenTelemetry traces: what the processes of a server share."""
