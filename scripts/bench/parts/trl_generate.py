"""transformers' `generate` as TRL's `GRPOTrainer` calls it. Runs where TRL is installed (see `../trl.py`).

    python trl_generate.py MODEL

Each line of standard input is a JSON object: `prompts`, lists of token ids of one length, and how many `new_tokens` to
sample for each. No token ends a sequence. It is answered by a line with the seconds that this took.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def main():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.generation_config = GenerationConfig(pad_token_id=0)  # no token ends a sequence
    for line in sys.stdin:
        load = json.loads(line)
        settings = GenerationConfig(
            max_new_tokens=load["new_tokens"],
            do_sample=True,
            pad_token_id=0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            disable_compile=True,
        )
        started = time.perf_counter()
        prompts = torch.tensor(load["prompts"])
        with torch.no_grad():
            tokens = model.generate(
                input_ids=prompts, attention_mask=torch.ones_like(prompts), generation_config=settings
            )
        seconds = time.perf_counter() - started
        sampled = tokens.shape[1] - prompts.shape[1]
        if sampled != load["new_tokens"]:
            sys.exit(f"generate sampled {sampled} tokens, and {load['new_tokens']} were asked for")
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
