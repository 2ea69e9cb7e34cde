"""A run as an indexed Job of Kubernetes: a pod per node, a headless Service that names them, and a NetworkPolicy that
lets nobody but these pods reach them.

A pod that is evicted or fails is started again. If it was rank 0's, the others fail and are started again too, and the
run goes on from its newest checkpoint. The text is JSON, which is YAML.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from titan_rl.launch.hosts.torchrun import NODES
from titan_rl.launch.jobs.job import TRUSTED, JobConfig, Start

_PORT = 29400
"""Where rank 0 has the store of the ranks."""
_START = """for second in $(seq 600); do getent hosts "$MASTER_ADDR" > /dev/null && break; sleep 1; done; exec "$@" """
"""A pod has no name in the cluster until it has an address."""
_RETRIES = 5
"""Failures of a node, without those by eviction, after which the job has failed."""


@dataclass(kw_only=True, slots=True)
class KubernetesConfig(JobConfig):
    """Pods of a Kubernetes cluster."""

    gpus_per_node: int = 0
    """NVIDIA's (`nvidia.com/gpu`)."""
    image: str = ""
    """With titan_rl and what the run imports, bash, and `python` on the path."""
    claim: str = ""
    """PersistentVolumeClaim that all pods may write (ReadWriteMany). It is mounted at `logging.directory`."""
    namespace: str = "default"
    memory: str = ""
    """Of each pod, such as `64Gi`; empty: no limit."""
    shared_memory: str = "16Gi"
    """Size of /dev/shm, which counts as memory. Kubernetes' own 64 MiB are too few."""

    program: ClassVar = ("kubectl", "apply", "--filename")
    required: ClassVar = ("image", "claim")

    def file(self, start: Start) -> Path:
        return Path.cwd() / f"{start.name}.json"

    def text(self, start: Start) -> str:
        name = dns_name(start.name)
        manifest = {"apiVersion": "v1", "kind": "List", "items": self._items(name, start)}
        return json.dumps(manifest, indent=2) + "\n"

    def _items(self, name: str, start: Start) -> list[dict[str, Any]]:
        labels = {"app.kubernetes.io/name": "titan-rl", "app.kubernetes.io/instance": name}
        metadata = {"name": name, "namespace": self.namespace, "labels": labels}
        nodes = [f"{name}-{index}" for index in range(self.nodes)]
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        variables: list[dict[str, Any]] = [
            {"name": "WORLD_SIZE", "value": str(self.nodes)},
            {"name": "LOCAL_WORLD_SIZE", "value": "1"},
            {"name": "MASTER_ADDR", "value": f"{name}-0.{name}"},
            {"name": "MASTER_PORT", "value": str(_PORT)},
            {"name": NODES, "value": " ".join(nodes)},
            {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        ]
        limits = {"nvidia.com/gpu": self.gpus_per_node, "cpu": self.cpus_per_node, "memory": self.memory}
        container = {
            "name": "titan-rl",
            "image": self.image,
            "command": ["bash", "-c", _START, "start", *start.command("python")],
            "env": variables,
            "resources": {"limits": {key: str(value) for key, value in limits.items() if value}},
            "volumeMounts": [
                {"name": "runs", "mountPath": str(start.directory.parent)},
                {"name": "shared-memory", "mountPath": "/dev/shm"},
            ],
        }
        pod = {
            "subdomain": name,
            "restartPolicy": "Never",
            "shareProcessNamespace": True,  # its first process reaps orphans
            "terminationGracePeriodSeconds": self.save_seconds,
            "containers": [container],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}},
                {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": self.shared_memory}},
            ],
        }
        job = {
            "completionMode": "Indexed",
            "completions": self.nodes,
            "parallelism": self.nodes,
            "backoffLimit": _RETRIES * self.nodes,
            "podFailurePolicy": {
                "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        # Headless; with names before the pods are ready, which is before they have met
        service = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": "meet", "port": _PORT}],
        }
        policy = {
            "podSelector": {"matchLabels": labels},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": labels}}]}],
        }
        return [
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
            {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": policy},
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {**metadata, "annotations": {"titan-rl/warning": TRUSTED}},
                "spec": job,
            },
        ]


def dns_name(name: str) -> str:
    """A name as Kubernetes takes it, with room for the number of a node behind it (RFC 1123)."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[-50:].lstrip("-0123456789") or "run"
