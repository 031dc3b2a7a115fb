"""Manifests of Kubernetes: https://kubernetes.io/docs/reference/kubernetes-api/"""

from tgi_cli.deploy.kubernetes.manifests import render

__all__ = ["render"]
