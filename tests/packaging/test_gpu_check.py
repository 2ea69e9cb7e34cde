"""scripts/gpu_check.py without a GPU: it says why nothing was tried; with the CPU as the device it computes (20 s)."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def gpu_check(*arguments: str, **variables: str) -> tuple[int, dict[str, dict], str]:
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check.py", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    *table, last = run.stdout.splitlines()
    return run.returncode, json.loads(last), "\n".join(table)


def test_without_a_device_every_check_says_why_it_was_not_tried():
    code, findings, table = gpu_check(CUDA_VISIBLE_DEVICES="")
    assert code == 3
    assert {"engine", "engine_tp2", "ranks_bf16", "trainer_tp", "checkpoint", "deterministic", "whole_run_8b"} <= set(
        findings
    )
    for name, finding in findings.items():
        assert finding["verdict"] == "not tried"
        assert "torch" in finding["detail"] and "CUDA" in finding["detail"]
        assert name in table


def test_a_check_computes_and_compares():
    code, findings, _ = gpu_check("--device", "cpu", "--only", "checkpoint")
    assert {name: finding["verdict"] for name, finding in findings.items()} == {"checkpoint": "works"}
    assert code == 0


def test_a_check_that_does_not_end_is_a_failure():
    code, findings, _ = gpu_check("--device", "cpu", "--only", "fingerprints", "--seconds", "0.01")
    assert code == 1
    assert findings["fingerprints"]["verdict"] == "failed"
    assert "killed after" in findings["fingerprints"]["detail"]
