"""Completions that must be what a structural tag says, through vLLM's structured outputs and the library xgrammar.

Every rank compiles a request's constraint when it is added and moves it on with every token, in the same calls, so all
ranks allow the same tokens in the same step. A completion that goes on elsewhere begins behind the tokens that it has.
"""

import json
import re
import threading
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from vllm.sampling_params import StructuredOutputsParams, check_json_nesting
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, has_xgrammar_unsupported_json_features
from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

from titan_rl.errors import GeneratorFailed, RequestError
from titan_rl.types import GenerationRequest, SamplingParams

LARGEST = 32_768
"""Characters of a constraint: one of several thousand values or properties takes seconds to compile."""
CACHE_BYTES = 256 << 20
"""Of compiled constraints."""
_IGNORED = {"not", "if", "dependentRequired", "dependentSchemas", "dependencies"}
_NAMED, _DATA = {"properties", "patternProperties", "$defs", "definitions"}, {"const", "enum", "default", "examples"}
"""Keywords that vLLM does not look for; whose values are schemas by name; whose values are no schemas."""
_PLACE = re.compile(r"\[[\d:]+\] \S+\.cc:\d+: ")
_BYTE_255 = {VocabType.BYTE_LEVEL: "\N{LATIN SMALL LETTER Y WITH DIAERESIS}", VocabType.BYTE_FALLBACK: "<0xFF>"}
"""As vocabularies write it."""


class Constraints:
    def __init__(self, manager: StructuredOutputManager, model_path: Path) -> None:
        self._manager: Any = manager
        self._model_path = model_path
        self._lock = threading.Lock()

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError: the constraint is too large, cannot be compiled, or says what the library ignores. Any
        thread may call it; compiling takes up to a second."""
        sampling, problem = request.sampling, ""
        if not sampling.stop_token_ids or sampling.min_new_tokens:
            problem = "a constraint needs a stop token that ends it, at any length"
        elif len(sampling.constraint) > LARGEST:
            problem = f"its constraint has {len(sampling.constraint)} characters, at most {LARGEST} are compiled"
        else:
            try:
                check_json_nesting(sampling.constraint, structural_tag=True)
                kind = StructuredOutputOptions.STRUCTURAL_TAG
                self._backend().compile_grammar(kind, sampling.constraint, set(sampling.stop_token_ids))
                if ignored := _ignored(json.loads(sampling.constraint)):
                    problem = f"its constraint has a schema of which something would be ignored: {ignored}"
            except Exception as error:  # the library has no class for it
                problem = f"its constraint cannot be compiled: {_PLACE.sub('', str(error)).strip()}"
        if problem:
            raise RequestError(f"request {request.request_id!r}: {problem}")

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
                size = config.model_config.get_vocab_size()
                backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=size)
                backend.compiler = GrammarCompiler(_without_marks(tokenizer, size), cache_limit_bytes=CACHE_BYTES)
                self._manager.tokenizer, self._manager.backend = tokenizer, backend
            return self._manager.backend


def _ignored(schema: Any, *, names: bool = False) -> str:
    """Keywords one of which the library would ignore; empty: there is none. `names`: keys are names of properties."""
    if isinstance(schema, list):
        return next(filter(None, map(_ignored, schema)), "")
    if not isinstance(schema, dict):
        return ""
    plain = schema if names else {key: value for key, value in schema.items() if key not in _DATA}
    inner = (_ignored(value, names=not names and key in _NAMED) for key, value in plain.items())
    if (found := next(filter(None, inner), "")) or names:
        return found
    looks = re.search(r"\(\?<?[=!]", str(plain.get("pattern")))  # ahead or back
    ignored = [key for key in plain if key in _IGNORED or (looks and key == "pattern")]
    return ", ".join(ignored or (plain.keys() - {"type"} if has_xgrammar_unsupported_json_features(plain) else ()))


def _without_marks(tokenizer: Any, size: int) -> TokenizerInfo:
    """The vocabulary in which some tokens are the byte 0xFF, which no text has: added ones like `</tool_call>`, which
    would end a text that they are part of, and are named by their ids; and those with control characters, which the
    library allows in strings of a bounded length, and JSON does not."""
    plain = TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    texts = [""] * size
    for text, token in tokenizer.get_vocab().items():
        if token < size:
            controls = any(byte < ord(" ") and byte != ord("\n") for byte in plain.decoded_vocab[token])
            hidden = controls or token in tokenizer.added_tokens_decoder
            texts[token] = _BYTE_255.get(plain.vocab_type, text) if hidden else text
    return TokenizerInfo(
        texts,
        plain.vocab_type,
        vocab_size=size,
        stop_token_ids=plain.stop_token_ids,
        add_prefix_space=plain.add_prefix_space,
    )
