"""TRL's `GRPOTrainer` on a task whose answers are known token by token. Runs where TRL is installed (see `../trl.py`).

    python trl_train.py JOB.json

The job: `model`, a directory; `settings` of a `GRPOConfig`; the `prompts` of training in their order, and `answers`,
the tokens of each, its end included; `held_out`, both of these for evaluation, which takes place `every` so many steps;
`metrics`, a file that gets a JSON object per step and per evaluation, as our runs write it.
"""

import json
import sys
from operator import eq

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def positions_equal(completion_ids, answer, **_):
    """Share of positions that are right, the end of the answer being one: equal positions / longer length."""
    both = zip(completion_ids, answer, strict=True)
    return [sum(map(eq, given, wanted)) / max(len(given), len(wanted)) for given, wanted in both]


class Records(TrainerCallback):
    """Evaluates before, during and after training, and writes down when what was done."""

    def __init__(self, job, tokenizer):
        self._every, self._file = job["every"], open(job["metrics"], "ab", buffering=0)
        self._held_out = tokenizer(job["held_out"]["prompts"], padding=True, padding_side="left", return_tensors="pt")
        width = job["settings"]["max_completion_length"]
        answers = [[*each, *[tokenizer.pad_token_id] * (width - len(each))] for each in job["held_out"]["answers"]]
        self._answers = torch.tensor(answers)  # [prompts, most new tokens]; padded as `generate` pads

    def on_train_begin(self, args, state, control, *, model, **_):
        self._evaluate(0, model)

    def on_step_end(self, args, state, control, *, model, **_):
        self._write(step=state.global_step)
        if state.global_step % self._every == 0 or state.global_step == args.max_steps:
            self._evaluate(state.global_step, model)

    def _evaluate(self, step, model):
        width = self._answers.shape[1]
        with torch.no_grad():
            tokens = model.generate(**self._held_out, do_sample=False, max_new_tokens=width)
        given = tokens[:, self._held_out["input_ids"].shape[1] :]
        given = torch.nn.functional.pad(given, (0, width - given.shape[1]), value=model.generation_config.pad_token_id)
        right = (given == self._answers).all(dim=1)
        self._write(step=step, **{"evaluation/exact_match": right.double().mean().item()})

    def _write(self, **numbers):
        self._file.write(json.dumps(numbers).encode() + b"\n")


def main():
    with open(sys.argv[1]) as file:
        job = json.load(file)
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=positions_equal,
        args=GRPOConfig(**job["settings"]),
        train_dataset=Dataset.from_dict({"prompt": job["prompts"], "answer": job["answers"]}),
    )
    trainer.add_callback(Records(job, trainer.processing_class))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
