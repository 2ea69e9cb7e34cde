"""Engines behind the gateway in tests: they say what the prompt tells them to, and never end where it says so."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.engine import StepOutput
from titan_rl.generation.simulated_engine import SimulatedEngine
from titan_rl.types import FinishReason, GenerationRequest, Piece

ECHO = "+"
"""A prompt that begins with this symbol is repeated, without it, and then the turn is ended."""
ECHO_LOGPROB = -0.25
ENDLESS = 1_000_000
"""So many new tokens take longer than any test."""


def obedient_engine(config: GeneratorConfig, model_path: str | Path, device: str) -> ObedientEngine:
    return ObedientEngine(Path(model_path), config)


class ObedientEngine(SimulatedEngine):
    def __init__(self, model_path: Path, config: GeneratorConfig) -> None:
        vocabulary = json.loads((model_path / "tokenizer.json").read_text())["model"]["vocab"]
        super().__init__(
            max_model_len=config.max_model_len,
            vocab_size=json.loads((model_path / "config.json").read_text())["vocab_size"],
            max_num_seqs=config.max_num_seqs,
        )
        self._echo = vocabulary[ECHO]
        self._requests: dict[str, GenerationRequest] = {}

    def _echoes(self, request: GenerationRequest) -> bool:
        return int(request.prompt_token_ids[0]) == self._echo

    def length_of(self, request: GenerationRequest) -> int:
        return len(request.prompt_token_ids) if self._echoes(request) else super().length_of(request)

    def add(self, request: GenerationRequest) -> None:
        if self._echoes(request):
            self._requests[request.request_id] = request
        super().add(request)

    def new_pieces(self) -> list[Piece]:
        pieces = []
        for piece in super().new_pieces():
            request = self._requests.get(piece.request_id)
            if request is not None:
                tokens = request.prompt_token_ids[1 + piece.offset : 1 + piece.end].astype(np.int32)
                piece = replace(piece, token_ids=tokens, logprobs=np.full(len(tokens), ECHO_LOGPROB, np.float32))
            pieces.append(piece)
        return pieces

    def step(self) -> StepOutput:
        time.sleep(0.001)
        output = super().step()
        finished = []
        for completion in output.finished:
            request = self._requests.pop(completion.request_id, None)
            if request is not None:
                tokens = np.append(request.prompt_token_ids[1:], 1).astype(np.int32)
                completion = replace(
                    completion,
                    token_ids=tokens,
                    logprobs=np.full(len(tokens), ECHO_LOGPROB, np.float32),
                    versions=np.full(len(tokens), completion.versions[0], np.int64),
                    finish_reason=FinishReason.STOP,
                )
            finished.append(completion)
        return StepOutput(finished, output.sampled)
