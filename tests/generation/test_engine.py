"""Requests that are refused, the process an engine needs, and the simulated engine. About 1 s."""

from __future__ import annotations

from pathlib import Path

import pytest
from loop_harness import make_request, simulated_tokens, streaming
from support.timed_engine import TimedEngine

from titan_rl.errors import ConfigError, RequestError
from titan_rl.generation.config import GeneratorConfig, check_environment, generator_environment
from titan_rl.generation.engine import MOST_PIECE_SECONDS, PIECE_SECONDS, validate_request
from titan_rl.generation.simulated_engine import SimulatedEngine, simulated_engine
from titan_rl.types import FinishReason, GenerationRequest

LIMITS = {"max_model_len": 16, "vocab_size": 13}


def test_requests_at_the_limits_are_taken() -> None:
    validate_request(make_request("a", prompt=(0, 12), new=14), **LIMITS)
    validate_request(make_request("a", temperature=0.0), **LIMITS)
    validate_request(make_request("a", temperature=0.01, top_p=1.0, top_k=1, stop_token_ids=(1, 12)), **LIMITS)
    validate_request(make_request("a", seed=2**63 - 1), **LIMITS)
    validate_request(make_request("a", new=5, min_new_tokens=5, repetition_penalty=0.1), **LIMITS)
    validate_request(make_request("a", presence_penalty=-2.0, frequency_penalty=2.0), **LIMITS)


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (make_request("a", prompt=()), "the prompt is empty"),
        (make_request("a", prompt=(0, 13)), "token 13 is outside of the vocabulary"),
        (make_request("a", prompt=(-1,)), "token -1 is outside of the vocabulary"),
        (make_request("a", new=12), "5 prompt tokens and 12 of max_new_tokens do not fit into max_model_len"),
        (make_request("a", new=0), "max_new_tokens must be at least 1"),
        (make_request("a", temperature=-1.0), "temperature must be"),
        (make_request("a", temperature=0.001), "temperature must be"),
        (make_request("a", temperature=float("nan")), "temperature must be"),
        (make_request("a", top_p=0.0), "top_p"),
        (make_request("a", top_p=1.5), "top_p"),
        (make_request("a", top_k=0), "top_k"),
        (make_request("a", min_p=1.5), "min_p"),
        (make_request("a", stop_token_ids=(13,)), "stop_token_ids"),
        (make_request("a", min_new_tokens=-1), "min_new_tokens"),
        (make_request("a", new=4, min_new_tokens=5), r"min_new_tokens must be in \[0, max_new_tokens \(4\)\], got 5"),
        (make_request("a", min_new_tokens=1, stop_token_ids=tuple(range(13))), "must not be a stop token"),
        (make_request("a", repetition_penalty=0.0), "repetition_penalty"),
        (make_request("a", repetition_penalty=float("inf")), "repetition_penalty"),
        (make_request("a", presence_penalty=2.1), r"presence_penalty must be in \[-2, 2\], got 2.1"),
        (make_request("a", frequency_penalty=float("nan")), "frequency_penalty"),
        (make_request("a", seed=-1), "seed"),
        (make_request("a", seed=2**63), "seed"),
        (make_request("a", seed=1.5), "the seed and stop_token_ids must be integers, got 1.5"),
        (make_request("a", stop_token_ids=(1.0,)), "must be integers"),
        (make_request("a", new=8.0), "max_new_tokens must be an integer, got 8.0"),
        (make_request(""), "request id"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_reason(request_: GenerationRequest, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        validate_request(request_, **LIMITS)


def test_an_engine_that_cannot_say_what_a_token_was_drawn_from_refuses_whom_it_would_mislead() -> None:
    class Silent(SimulatedEngine):
        tells_support = False

    asked = make_request("a", top_p=0.5, support=True)
    SimulatedEngine().validate(asked)  # it draws from everything
    Silent().validate(make_request("a", top_p=0.5))
    with pytest.raises(RequestError, match="'a': this engine does not say which tokens were possible, .* top_p"):
        Silent().validate(asked)


@pytest.mark.parametrize(
    "option",
    [{"min_new_tokens": 1}, {"repetition_penalty": 1.1}, {"presence_penalty": -0.5}, {"frequency_penalty": 0.5}],
)
def test_options_that_count_the_tokens_so_far_say_so(option: dict[str, float]) -> None:
    assert make_request("a", **option).sampling.depends_on_output
    assert not make_request("a", temperature=0.5, top_p=0.9, top_k=3, stop_token_ids=(1,)).sampling.depends_on_output


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("device", "variable"), [("cpu", "VLLM_CPU_ATTN_SPLIT_KV=0"), ("cuda", "VLLM_BATCH_INVARIANT=1")]
)
def test_a_deterministic_engine_refuses_a_process_without_its_environment(
    monkeypatch: pytest.MonkeyPatch, device: str, variable: str
) -> None:
    for name, value in (generator_environment(device, deterministic=True) | ALONE).items():
        monkeypatch.setenv(name, value)
    check_environment(device, tensor_parallel=1, deterministic=True)
    monkeypatch.delenv(variable.partition("=")[0])
    check_environment(device, tensor_parallel=1)
    with pytest.raises(ConfigError, match=variable):
        check_environment(device, tensor_parallel=1, deterministic=True)


def test_an_engine_refuses_a_process_without_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (generator_environment("cpu") | ALONE).items():
        monkeypatch.setenv(name, value)
    check_environment("cpu", tensor_parallel=1)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    with pytest.raises(ConfigError, match="TORCHDYNAMO_DISABLE=1"):
        check_environment("cpu", tensor_parallel=1)
    for name, value in generator_environment("cuda").items():
        monkeypatch.setenv(name, value)
    check_environment("cuda", tensor_parallel=1)


VOCAB = 13


def test_a_step_waits_as_long_as_its_batch_takes() -> None:
    waits: list[float] = []
    engine = TimedEngine(seconds_per_step=0.5, seconds_per_sequence=0.25, max_num_seqs=2, sleep=waits.append)
    for name in "abc":
        engine.add(make_request(name, new=2))
    while engine.has_work():
        engine.step()
    assert waits == [1.0, 1.0, 0.75, 0.75]


def test_a_stop_token_and_a_short_answer_end_a_completion() -> None:
    first_three = simulated_tokens(9, 3, VOCAB)

    class Short(SimulatedEngine):
        def length_of(self, request: GenerationRequest) -> int:
            return 3

    engine = Short(vocab_size=VOCAB)
    engine.add(make_request("short", new=8, seed=9))
    engine.add(make_request("cut", new=3, seed=9))
    engine.add(make_request("stopped", new=8, seed=9, stop_token_ids=(first_three[1],)))
    done = {}
    while engine.has_work():
        done |= {completion.request_id: completion for completion in engine.step().finished}
    assert (done["short"].finish_reason, len(done["short"].token_ids)) == (FinishReason.STOP, 3)
    assert done["cut"].finish_reason is FinishReason.LENGTH
    stop_at = first_three.index(first_three[1]) + 1
    assert (done["stopped"].finish_reason, len(done["stopped"].token_ids)) == (FinishReason.STOP, stop_at)


def test_each_stream_gets_its_first_token_at_once_and_all_together_a_piece_in_so_many_seconds() -> None:
    now = 0.0
    engine = SimulatedEngine(vocab_size=VOCAB, clock=lambda: now)

    def pieces_after_a_step() -> dict[str, tuple[int, list[int]]]:
        engine.step()
        return {each.request_id: (each.offset, each.token_ids.tolist()) for each in engine.new_pieces()}

    def tokens(name: str, start: int, end: int) -> tuple[int, list[int]]:
        return start, simulated_tokens(ord(name), end, VOCAB)[start:]

    for name in "ab":
        engine.add(streaming(name, new=20, seed=ord(name)))
    assert pieces_after_a_step() == {"a": tokens("a", 0, 1), "b": tokens("b", 0, 1)}
    now = 1.9 * PIECE_SECONDS
    engine.add(streaming("c", new=20, seed=ord("c")))
    assert pieces_after_a_step() == {"c": tokens("c", 0, 1)}
    assert pieces_after_a_step() == {}
    now = 2 * PIECE_SECONDS
    assert pieces_after_a_step() == {"a": tokens("a", 1, 4), "b": tokens("b", 1, 4), "c": tokens("c", 1, 3)}
    now = 4.9 * PIECE_SECONDS
    assert pieces_after_a_step() == {}
    now = 5 * PIECE_SECONDS
    assert pieces_after_a_step() == {"a": tokens("a", 4, 6), "b": tokens("b", 4, 6), "c": tokens("c", 3, 5)}


def test_many_streams_do_not_wait_longer_than_the_bound() -> None:
    now = 0.0
    engine = SimulatedEngine(vocab_size=VOCAB, clock=lambda: now)
    for name in range(200):
        engine.add(streaming(str(name), new=20))
    lengths = []
    for moment in (0.0, 0.9, 1.0, 1.9, 2.0):
        now = moment * MOST_PIECE_SECONDS
        engine.step()
        lengths.append([len(each.token_ids) for each in engine.new_pieces()])
    assert lengths == [[1] * 200, [], [2] * 200, [], [2] * 200]


def test_a_configured_one_has_the_models_vocabulary_and_the_configs_limits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 13}')
    engine = simulated_engine(GeneratorConfig(max_model_len=16), tmp_path, "cpu")
    engine.validate(make_request("a", prompt=(2, 12), new=14))
    for wrong in (make_request("a", prompt=(2, 13)), make_request("a", prompt=(2, 12), new=15)):
        with pytest.raises(RequestError):
            engine.validate(wrong)
