"""Hosts as pods of Kubernetes, and the manifests of a run."""
