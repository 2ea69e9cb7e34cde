"""Run directories as a run writes them, made in a moment: an asynchronous sum task that learns, or does not."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

CONFIG = """recipe = "{recipe}"
seed = {seed}
[rollout]
samples_per_group = 8
[trainer]
dtype = "float32"
[trainer.optimizer]
lr = {lr}
max_grad_norm = 1.0
[trainer.loss.kwargs]
clip_low = 0.2
[loop]
steps = {steps}
groups_per_step = 16
max_staleness = 2
[generator]
count = 2
"""

HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)//\u2028\x00 ]]> &lt; \U0001f600 \ud83d"
"""What a policy might write; the last character is half of one."""


def make_run(
    directory: Path,
    *,
    steps: int = 40,
    rollouts: int = 8,
    seed: int = 0,
    lr: float = 0.0005,
    learns: bool = True,
    answer: str = "",
    recipe: str = "tool_sum_async",
    metrics: dict[str, float] | None = None,
    done: bool = True,
) -> Path:
    """Write a run directory; returns it.

    Args:
        rollouts: recorded in every step.
        answer: instead of what the policy would have said.
        metrics: replace numbers of every step.
    """
    chance = random.Random(seed)
    (directory / "spans").mkdir(parents=True)
    (directory / "config.toml").write_text(CONFIG.format(recipe=recipe, seed=seed, lr=lr, steps=steps))
    lines = [_evaluation(0, 0.01)]
    records = []
    for step in range(1, steps + 1):
        skill = 0.15 + 0.8 / (1 + math.exp(-(step - steps * 0.45) / (steps * 0.1))) if learns else 0.3
        lines.append(_step(step, skill, chance) | (metrics or {}))
        if step % 10 == 0:
            lines.append(_evaluation(step, max(0.0, skill + chance.uniform(-0.03, 0.03))))
            records += [_rollout(step, sample, skill, chance, answer, evaluated=True) for sample in range(2)]
        records += [_rollout(step, sample, skill, chance, answer) for sample in range(rollouts)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with open(directory / "rollouts.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    if done:
        summary = {"steps": steps, "seconds_total": 3.0 + 0.7 * steps, "stopped_early": False}
        (directory / "summary.json").write_text(json.dumps(summary))
    _write_spans(directory / "spans", steps, chance)
    return directory


def _evaluation(step: int, score: float) -> dict[str, Any]:
    return {"step": step, "evaluation/exact_match": score, "evaluation/reward": score, "evaluation/failed": 0}


def _step(step: int, skill: float, chance: random.Random) -> dict[str, Any]:
    noise = chance.gauss
    return {
        "step": step,
        "rollout/reward_mean": min(1.0, max(0.0, skill + noise(0, 0.04))),
        "rollout/reward_std": 0.4,
        "rollout/tokens": int(1500 + noise(0, 60)),
        **{f"rollout/length_{which}": 12.0 for which in ("mean", "p50", "p95")},
        **{f"rollout/trained_length_{which}": 9.5 for which in ("mean", "p50", "p95")},
        "rollout/truncated_share": max(0.0, 0.05 + noise(0, 0.02)),
        "rollout/failed": 0,
        "rollout/turns_mean": 1 + skill,
        "reward/exact_match": skill,
        "reward/tool_use": min(1.0, skill + 0.1),
        "generation/seconds_in_engine": 0.18 + noise(0, 0.02),
        "staleness/age_mean": 1.2,
        "staleness/age_max": 2,
        "staleness/share_of_age_0": 0.15,
        "staleness/share_of_age_1": 0.5,
        "staleness/share_of_age_2": 0.35,
        "groups/equal_rewards": skill * 0.6,
        "train/loss": noise(0, 0.05),
        "train/entropy": 0.9 - 0.5 * skill + noise(0, 0.02),
        "train/kl_k3": 0.004 + abs(noise(0, 0.002)),
        "train/effective_sample_size": 0.97,
        "train/logprob_difference_mean": 1.1e-7,
        "train/logprob_alarm": 0.0,
        "train/grad_norm": 0.6 + abs(noise(0, 0.1)),
        "train/lr": 0.0005,
        "seconds/rollout": 0.5,
        "seconds/train": 0.2,
        "seconds/step": 0.7 + abs(noise(0, 0.05)),
    }


def _rollout(
    step: int, sample: int, skill: float, chance: random.Random, answer: str = "", *, evaluated: bool = False
) -> dict[str, Any]:
    a, b = chance.randint(10, 99), chance.randint(10, 99)
    right = chance.random() < skill
    said = answer or str(a + b if right else a + b + chance.choice((-10, 1, 7)))
    prompt = [*f"{a}+{b}="]
    call = ["<tool>", *f"{a}+{b}", "</tool>"]
    result = ["<result>", *str(a + b), "</result>"]
    last = [*said, "<end>"]
    texts = prompt + call + result + last
    trained = [0] * len(prompt) + [1] * len(call) + [0] * len(result) + [1] * len(last)
    branches = [_branch(sample, texts, trained, step, chance, evaluated)]
    if sample % 4 == 3:  # an edited history: it shares the prompt and the call
        kept = len(prompt) + len(call)
        edited = texts[:kept] + ["<result>", "?", "</result>", "0", "<end>"]
        mask = [0] * kept + [0, 0, 0, 1, 1]
        branches.append(_branch(sample + 8, edited, mask, step, chance, evaluated))
    reward = float(right)
    return {
        "step": step,
        "purpose": "evaluate" if evaluated else "train",
        "group": 16 * step + sample // 4,
        "attempt": 0,
        "sample": sample,
        "kept": ["best"] if sample == 0 else ["worst"] if sample == 1 else ["random"],
        "reward": reward,
        "sampled_tokens": sum(map(sum, (branch["trained"] for branch in branches))),
        "reward_parts": {"exact_match": reward, "tool_use": 1.0},
        "advantage": None if evaluated else round((reward - skill) / 0.4, 6),
        "stop_reason": "stop",
        "error": "",
        "wanted": str(a + b),
        "messages": [
            {"role": "user", "content": f"{a}+{b}="},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": a, "b": b}}]},
            {"role": "tool", "name": "add", "content": str(a + b)},
            {"role": "assistant", "content": said},
        ],
        "turns": [
            {"request": f"r{step}-{sample}-{turn}", "seed": step, "generator": f"generator{sample % 2}",
             "finish": "stop", "tokens": count}
            for turn, count in enumerate((len(call), len(last)))
        ],
        "branches": branches,
    }  # fmt: skip


def _branch(
    sample: int, texts: list[str], trained: list[int], step: int, chance: random.Random, evaluated: bool
) -> dict[str, Any]:
    logprobs = [-chance.expovariate(4) if mask else None for mask in trained]
    theirs = [None if each is None else each + chance.gauss(0, 0.03) for each in logprobs]
    return {
        "sample": sample,
        "token_ids": [sum(map(ord, text)) % 997 for text in texts],
        "texts": texts,
        "trained": trained,
        "logprobs": logprobs,
        "trainer_logprobs": None if evaluated else theirs,
        "weights": None if evaluated else [1 / 1500 if mask else 0 for mask in trained],
        "versions": [f"v{max(0, step - 1 - (at > 12))}" if mask else "" for at, mask in enumerate(trained)],
    }


WORK = {
    "controller": [("serve", 0.1, ""), ("wait", 0.6, "rollouts")],
    "trainer": [
        *[("wait", 0.42, "rollouts"), ("forward", 0.09, ""), ("backward", 0.13, ""), ("optimizer", 0.02, "")],
        ("publish", 0.04, ""),
    ],
    "router": [("serve", 0.1, ""), ("wait", 0.6, "rollouts")],
    **{
        name: [("prefill", 0.06, ""), ("decode", 0.5, ""), ("pull", 0.05, ""), ("wait", 0.09, "slots")]
        for name in ("generator0", "generator1")
    },
    "rollout0": [("environment", 0.2, ""), ("wait", 0.5, "generators")],
}
"""What each mesh does in a step: name, seconds, and for whom it waits."""


def _write_spans(directory: Path, steps: int, chance: random.Random) -> None:
    for pid, (mesh, work) in enumerate(WORK.items()):
        moment = 1.7e9 + chance.random() / 10
        about = {"name": mesh, "mesh": mesh, "rank": 0, "host": "here", "pid": pid}
        lines: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "args": about}]
        for tid, lane in enumerate(("main", "train")):
            lines.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
        for step in range(steps + 1):
            wobble = chance.uniform(0.9, 1.1)
            for name, seconds, waits_for in work if step else [("start", 3.0, "")]:
                times = {"ts": round(moment * 1e6), "dur": round(seconds * wobble * 1e6)}
                args = {"args": {"waits for": waits_for}} if waits_for else {}
                lines.append({"ph": "X", "name": name, "pid": pid, "tid": 0, **times, **args})
                moment += seconds * wobble
            if mesh == "controller" and step:
                times = {"ts": round((moment - 0.2) * 1e6), "dur": 200_000}
                lines.append({"ph": "X", "name": "train", "pid": pid, "tid": 1, **times, "args": {"step": 1}})
        (directory / f"{mesh}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
