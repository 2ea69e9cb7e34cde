"""Completions that must be what a structural tag says, through vLLM's structured outputs and the library xgrammar.

Every rank compiles a request's constraint when it is added and moves it on with every token, in the same calls, so all
ranks allow the same tokens in the same step. A completion that goes on elsewhere begins behind the tokens that it has.
"""

import threading
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from titan_rl.errors import GeneratorFailed, RequestError
from titan_rl.types import GenerationRequest, SamplingParams


class Constraints:
    """Of one engine."""

    def __init__(self, manager: StructuredOutputManager, model_path: Path) -> None:
        self._manager: Any = manager
        self._model_path = model_path
        self._lock = threading.Lock()

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError: the constraint cannot be compiled, or could not end. Any thread may call it."""
        sampling = request.sampling
        if not sampling.stop_token_ids:
            raise RequestError(f"request {request.request_id!r}: a constraint needs a stop token that ends it")
        try:
            kind = StructuredOutputOptions.STRUCTURAL_TAG
            self._backend().compile_grammar(kind, sampling.constraint, set(sampling.stop_token_ids))
        except Exception as error:  # the library has no class for it
            raise RequestError(f"request {request.request_id!r}: its constraint cannot be compiled: {error}") from error

    def params(self, sampling: SamplingParams) -> StructuredOutputsParams:
        params = StructuredOutputsParams(structural_tag=sampling.constraint)
        params._backend = "xgrammar"
        return params

    def begin(self, request: Request, sampled: list[int]) -> None:
        """Before a request is added that has a constraint. `sampled`: tokens of its completion that it begins with."""
        self._backend()
        self._manager.grammar_init(request)
        assert request.structured_output_request is not None
        grammar = request.structured_output_request.grammar
        if isinstance(grammar, Exception) or grammar is None:
            raise GeneratorFailed(f"the constraint of {request.request_id!r} was not compiled: {grammar}")
        if not grammar.accept_tokens(request.request_id, sampled):
            raise GeneratorFailed(f"the constraint of {request.request_id!r} does not allow the tokens that it has")

    def _backend(self) -> XgrammarBackend:
        with self._lock:
            if self._manager.backend is None:
                config = self._manager.vllm_config
                tokenizer: Any = AutoTokenizer.from_pretrained(self._model_path)
                self._manager.tokenizer = tokenizer
                self._manager.backend = XgrammarBackend(
                    config, tokenizer=tokenizer, vocab_size=config.model_config.get_vocab_size()
                )
            return self._manager.backend
