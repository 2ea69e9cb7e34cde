"""What `titan-rl doctor` finds, of hosts that a test describes and of this one (a second)."""

from __future__ import annotations

from titan_rl.cli import main
from titan_rl.errors import AbsentError, ConfigError, ConfigWarning
from titan_rl.hosts.facts import HostFacts
from titan_rl.run import doctor
from titan_rl.run.doctor import examine

HOST = HostFacts(cpus=4, memory=16 << 30, open_files=4096)


def problems(host=HOST, about="") -> list[str]:
    return [str(each) for name, each in examine(host) if name.startswith(about) and isinstance(each, ConfigError)]


def test_a_good_host_has_no_problem():
    assert problems(about="processor") == []
    assert {"packages", "processor", "devices"} <= {about for about, _ in examine(HOST)}


def test_packages_that_are_missing_stop_a_run_and_others_versions_are_warned_of(monkeypatch):
    versions = {"torch": "2.12.0+cpu", "torchmonarch": "0.7.0", "torchtitan": "", "vllm": "0.32.0"}
    monkeypatch.setattr(doctor, "installed", lambda name: versions.get(name, doctor.pins().get(name, "")))
    torch, titan = doctor.quick_problems(".")
    assert str(torch).startswith("torch 2.12.0+cpu is installed, and titan_rl was tested with 2.13.0")
    assert str(titan).startswith("the package torchtitan is not installed")
    assert isinstance(torch, ConfigWarning) and isinstance(titan, AbsentError)
    assert len([sentence for sentence in problems() if "torch 2.12" in sentence]) == 1


def test_a_host_that_cannot_isolate_programs_of_the_policy_is_told(monkeypatch):
    def refuse(source):
        raise AbsentError("namespaces are missing")

    monkeypatch.setattr(doctor, "run_policy_code", refuse)
    assert problems(about="policy code") == ["namespaces are missing"]


def test_a_full_disk_is_told_at_every_start(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "LITTLE_DISK", 1 << 60)
    directory = str(tmp_path / "not" / "there")
    (found,) = [each for each in doctor.quick_problems(directory) if "GiB free" in str(each)]
    assert str(tmp_path) in str(found) and isinstance(found, ConfigWarning)


def test_the_exit_code_says_whether_something_would_stop_every_run(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "detect_host", lambda: HOST)
    assert main(["doctor"]) == 0
    monkeypatch.setattr(doctor, "installed", lambda name: "" if name == "vllm" else doctor.pins().get(name, "1"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "stops    packages" in out and "1 problem would stop a run" in out
    assert main(["doctor", "--recipe", "copy4"]) == 2
