"""vLLM, which writes down what it sampled: the ground truth of what a session has to train."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.engine import StepOutput
from titan_rl.generation.vllm.engine import VllmEngine
from titan_rl.types import GenerationRequest

VARIABLE = "TITAN_RL_TEST_SAMPLED"
"""Names the file that gets one pickle per completion: prompt, tokens, logprobs, versions, seed."""


def sampling_engine(config: GeneratorConfig, model_path: str | Path, device: str) -> SamplingEngine:
    return SamplingEngine(config, model_path, device)


class SamplingEngine(VllmEngine):
    def add(self, request: GenerationRequest) -> None:
        self.__dict__.setdefault("requests", {})[request.request_id] = request
        super().add(request)

    def step(self) -> StepOutput:
        output = super().step()
        with open(os.environ[VARIABLE], "ab") as file:
            for completion in output.finished:
                request = self.__dict__["requests"].pop(completion.request_id)
                arrays = (request.prompt_token_ids, completion.token_ids, completion.logprobs, completion.versions)
                file.write(pickle.dumps((*(array.tolist() for array in arrays), request.seed)))
        return output
