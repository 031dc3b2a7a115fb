"""Replicas as deployments of Ray Serve, on one machine or on a cluster (extra ``ray``)."""
