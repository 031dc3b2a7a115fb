"""Files that run ``tgi serve`` under Docker, Compose, systemd and Kubernetes."""
