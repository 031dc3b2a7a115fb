"""Access log, Prometheus metrics and OpenTelemetry traces."""
