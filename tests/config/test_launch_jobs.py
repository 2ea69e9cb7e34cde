"""`titan-rl launch`: what it refuses, and the scripts and manifests that it writes (2 s)."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from titan_rl import cli
from titan_rl.submit import KubernetesConfig, SlurmConfig, dns_name, train_in
from titan_rl.train import VERB, resolve

DIRECTORY = Path("/runs/it's here/cpu_smoke-20260101-120000")
START = DIRECTORY, train_in(DIRECTORY, ("--recipe", "cpu_smoke", "--loop.steps", "7"))
TRUSTED = "--trusted-network"


def launched(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["launch", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["lsf"], "there is no kind 'lsf'; there are slurm, kubernetes"),
        (["slurm", "--nodes", "0", TRUSTED, "--"], "--nodes: expected an integer of at least 1"),
        (["slurm", "--nodes", "2", "--"], "--nodes 2: whoever reaches a port .* add --trusted-network"),
        (["slurm", "--nodes", "2", TRUSTED], "name a recipe"),
        (["slurm", "--node", "2", TRUSTED], "--node: there is no such setting .did you mean --nodes"),
        (["slurm", "--nodes", "2", TRUSTED, "--", "--recipe", "cpu_smok"], "cpu_smok"),
        (["slurm", "--", "--recipe", "cpu_smoke", "--resume", "x"], "leave out --resume: the job decides"),
        (["slurm", "--", "--recipe", "cpu_smoke", "--hosts", "127.0.0.1:1"], "leave out placement.hosts"),
        (["slurm", "--", "--recipe", "cpu_smoke"], "there is no sbatch on this machine"),
        (["kubernetes", "--", "--recipe", "cpu_smoke"], "name --image IMAGE and --claim CLAIM"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    code, out, err = launched(capsys, *words)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and re.search(sentence, err), err


def test_a_dry_run_prints_the_script_and_makes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    train = ["--recipe", "cpu_smoke", "--logging.directory", str(tmp_path)]
    code, out, err = launched(capsys, "slurm", "--nodes", "2", TRUSTED, "--dry-run", "--", *train)
    assert (code, err, list(tmp_path.iterdir())) == (0, "", [])
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=cpu_smoke-2") and f"directory={tmp_path}/cpu_smoke-2" in out


@pytest.mark.parametrize("kind", [SlurmConfig(nodes=2), KubernetesConfig(nodes=2)])
def test_every_node_starts_a_run_that_goes_on_in_the_directory_of_the_job(kind: Any) -> None:
    text = kind.text(*START, 0)
    assert "Trusted networks only" in text
    assert all(name in text for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TITAN_RL_NODES"))
    command = VERB.read(START[1][2:])
    assert command.values["--resume"] == "auto" and "placement.trusted_network" in command.given
    config = resolve(command)
    assert config.logging.directory == str(DIRECTORY) and config.loop.steps == 7


def test_the_script_of_slurm_is_sound_bash_and_asks_to_be_queued_again() -> None:
    job = SlurmConfig(nodes=3, partition="gpu", time="4:00:00", gpus_per_node=8, sbatch=("account=me", "no-kill"))
    script = job.text(*START, 0)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    options = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {"nodes=3", "ntasks-per-node=1", "exclusive", "mem=0", "gpus-per-node=8", "partition=gpu"} <= options
    assert {"time=4:00:00", "requeue", "signal=HUP@120", "open-mode=append", "account=me", "no-kill"} <= options
    assert f"output={shlex.quote(str(DIRECTORY / 'job.log'))}" in options


def test_a_slurm_job_may_share_its_nodes() -> None:
    script = SlurmConfig(cpus_per_node=4).text(*START, 0)
    assert "#SBATCH --cpus-per-task=4\n" in script and "exclusive" not in script


def test_the_manifest_of_kubernetes_has_the_structure_that_kubernetes_asks_for() -> None:
    job = KubernetesConfig(nodes=2, image="me/rl:1", claim="runs", gpus_per_node=8, namespace="team")
    items = {item["kind"]: item for item in yaml.safe_load_all(job.text(*START, 0))}
    versions = {kind: item["apiVersion"] for kind, item in items.items()}
    assert versions == {"Service": "v1", "NetworkPolicy": "networking.k8s.io/v1", "Job": "batch/v1"}
    name = "cpu-smoke-20260101-120000"
    assert all(item["metadata"]["name"] == name for item in items.values())
    assert all(item["metadata"]["namespace"] == "team" for item in items.values())

    spec = items["Job"]["spec"]
    pod = spec["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert pod["restartPolicy"] == "Never"  # a podFailurePolicy asks for that
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["Ignore"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert all(isinstance(entry.get("value", ""), str) for entry in container["env"])
    assert all(isinstance(word, str) for word in container["command"])
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    # a pod of an indexed Job is NAME-INDEX, and a headless Service calls it NAME-INDEX.SERVICE
    assert values["MASTER_ADDR"] == f"{name}-0.{items['Service']['metadata']['name']}" and pod["subdomain"] == name
    assert values["WORLD_SIZE"] == "2" and values["TITAN_RL_NODES"] == f"{name}-0 {name}-1"

    labels = spec["template"]["metadata"]["labels"]
    assert items["Service"]["spec"]["selector"] == labels and items["Service"]["spec"]["clusterIP"] == "None"
    policy = items["NetworkPolicy"]["spec"]
    assert (
        policy["podSelector"]["matchLabels"] == policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == labels
    )


def test_a_job_with_gpus_has_what_nccl_rdma_and_publications_need() -> None:
    job = KubernetesConfig(image="me/rl:1", claim="runs", gpus_per_node=8, rdma="rdma/hca")
    pod = list(yaml.safe_load_all(job.text(*START, 200 << 30)))[2]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/hca": "1"}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert {"medium": "Memory", "sizeLimit": "250Gi"} in [volume.get("emptyDir") for volume in pod["volumes"]]
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in container["env"]
    script = SlurmConfig(gpus_per_node=8).text(*START, 0)
    assert "#SBATCH --gpus-per-node=8\n" in script and " NCCL_DEBUG=WARN\n" in script


def test_devs_shm_of_a_manifest_follows_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    def size(*options: str) -> str:
        words = ["kubernetes", "--image", "i", "--claim", "c", "--dry-run", *options, "--", "--recipe", "copy4"]
        _, out, _ = launched(capsys, *words, "--policy.path", "/no/Qwen3-8B", "--generator.dtype", "bfloat16")
        return re.search(r'sizeLimit: "(\w+)"', out)[1]

    assert size() == "267Gi" and size("--shared-memory", "9Gi") == "9Gi"


@pytest.mark.parametrize("name", ["cpu_smoke-20260101-120000", "7B.run_" + "x" * 90, "_", "Ünïcode/run"])
def test_a_name_in_dns_is_a_label_with_room_for_an_index(name: str) -> None:
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", dns_name(name)) and len(dns_name(name)) <= 50
