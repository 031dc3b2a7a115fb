"""What watches servers: a dashboard of Grafana and alert rules of Prometheus."""
