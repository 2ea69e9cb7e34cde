"""Requests, completions and pieces packed into a few flat arrays for a message.

A message of n requests costs about ten array headers instead of several per request: pickling 256 small
completions one by one costs more than sampling them. Packing is exact: `unpack(pack(x)) == x`, in the same order,
and unpacked arrays are views of the message. What a message cannot carry exactly (a token id of more than 32 bits, a
fraction where an integer belongs) raises ValueError, and nothing is packed.

A packed message reduces itself to bytes before Monarch's pickler sees it: that one takes five times as long over a
dataclass of arrays.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from titan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Piece,
    PolicyVersion,
    SamplingParams,
)


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    """[n + 1] int64: where each array begins in the concatenation, and where the last ends."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


_KINDS = {"i": "iu", "f": "f", "b": "b"}
"""Kinds of arrays that may travel as integers, floats and booleans; their values must be the same afterwards."""


def _concatenate(items: Sequence[Any], name: str, dtype: type, lengths: list[int]) -> np.ndarray:
    """The arrays `name` of all items in one of `dtype`. Raises ValueError where one is not one-dimensional, has another
    length than `lengths` says or would lose something."""
    exact = [
        array
        if isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == 1
        else _converted(name, np.asarray(array), np.dtype(dtype))
        for array in (getattr(item, name) for item in items)
    ]
    if (found := [len(array) for array in exact]) != lengths:
        raise ValueError(f"{name} have {found} elements, and token_ids {lengths}")
    return np.concatenate(exact) if exact else np.zeros(0, dtype)


def _converted(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions; one is expected")
    if not array.size:
        return np.zeros(0, dtype)
    if array.dtype.kind not in _KINDS[dtype.kind]:
        raise ValueError(f"{name} holds {array.dtype}; {dtype} is expected")
    with np.errstate(over="ignore"):  # it is found below
        converted = array.astype(dtype)
    if not np.array_equal(converted, array, equal_nan=dtype.kind == "f"):
        lost = array[(converted != array) & (array == array)][0]
        raise ValueError(f"{name} holds {lost}, which is not exact as {dtype}")
    return converted


def _integers(name: str, values: Sequence[int], dtype: type) -> np.ndarray:
    """[n] of `dtype`. Raises ValueError where one is no integer or out of range."""
    try:
        return np.array([index(value) for value in values], dtype=dtype)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from error


def _check_integers(sampling: SamplingParams) -> None:
    counts = (sampling.max_new_tokens, sampling.top_k, sampling.min_new_tokens)
    _integers("max_new_tokens, top_k, min_new_tokens or stop_token_ids", (*counts, *sampling.stop_token_ids), np.int64)


_FINISH_REASONS = {reason.value: reason for reason in FinishReason}


class _Packed:
    """A dataclass that pickles as one string of bytes."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        names: tuple[str, ...] = type(self).__slots__
        fields = tuple(getattr(self, name) for name in names)
        return _restore, (type(self), pickle.dumps(fields, pickle.HIGHEST_PROTOCOL))


def _restore(cls: type[_Packed], fields: bytes) -> _Packed:
    return cls(*pickle.loads(fields))


@dataclass(frozen=True, slots=True)
class PackedRequests(_Packed):
    """Many requests in one message. Sampling parameters are stored once per distinct value."""

    request_ids: tuple[str, ...]
    session_ids: tuple[str | None, ...]
    offsets: np.ndarray  # [n + 1] int64
    prompt_token_ids: np.ndarray  # [sum of prompt lengths] int32
    seeds: np.ndarray  # [n] int64
    min_versions: np.ndarray  # [n] int64, encoded
    sampling: tuple[SamplingParams, ...]
    sampling_index: np.ndarray  # [n] int32
    pinned_to: tuple[str | None, ...]
    stream_from: tuple[int, ...] | None = None
    """None: nobody wants pieces."""

    @staticmethod
    def pack(requests: Sequence[GenerationRequest]) -> PackedRequests:
        lengths = [len(request.prompt_token_ids) for request in requests]
        # By identity first: hashing a SamplingParams costs more than all else here, and most share one object.
        distinct: dict[SamplingParams, int] = {}
        known: dict[int, int] = {}
        numbers: list[int] = []
        for request in requests:
            number = known.get(id(request.sampling))
            if number is None:
                _check_integers(request.sampling)  # else 8.0, which equals 8, would travel in its place
                number = known[id(request.sampling)] = distinct.setdefault(request.sampling, len(distinct))
            numbers.append(number)
        codes = {version: version.encode() for version in {request.min_version for request in requests}}
        starts = tuple(request.stream_from for request in requests)
        return PackedRequests(
            request_ids=tuple(request.request_id for request in requests),
            session_ids=tuple(request.session_id for request in requests),
            offsets=_offsets(lengths),
            prompt_token_ids=_concatenate(requests, "prompt_token_ids", np.int32, lengths),
            seeds=_integers("seed", [request.seed for request in requests], np.int64),
            min_versions=np.array([codes[request.min_version] for request in requests], dtype=np.int64),
            sampling=tuple(distinct),
            sampling_index=np.array(numbers, dtype=np.int32),
            pinned_to=tuple(request.pinned_to for request in requests),
            stream_from=starts if any(start != -1 for start in starts) else None,
        )

    def unpack(self) -> list[GenerationRequest]:
        # Python's own numbers: taking them out of arrays one by one would cost more than the rest.
        bounds, seeds, indices = self.offsets.tolist(), self.seeds.tolist(), self.sampling_index.tolist()
        versions = {code: PolicyVersion.decode(code) for code in set(self.min_versions.tolist())}
        min_versions = [versions[code] for code in self.min_versions.tolist()]
        starts = self.stream_from or (-1,) * len(self.request_ids)
        return [
            GenerationRequest(
                request_id=request_id,
                prompt_token_ids=self.prompt_token_ids[bounds[i] : bounds[i + 1]],
                sampling=self.sampling[indices[i]],
                seed=seeds[i],
                min_version=min_versions[i],
                session_id=self.session_ids[i],
                pinned_to=self.pinned_to[i],
                stream_from=starts[i],
            )
            for i, request_id in enumerate(self.request_ids)
        ]


@dataclass(frozen=True, slots=True)
class PackedCompletions(_Packed):
    """Many completions in one message."""

    request_ids: tuple[str, ...]
    offsets: np.ndarray  # [n + 1] int64
    token_ids: np.ndarray  # [sum of lengths] int32
    logprobs: np.ndarray  # [sum of lengths] float32
    versions: np.ndarray  # [sum of lengths] int64
    finish_reasons: tuple[str, ...]
    generators: tuple[str, ...]
    metrics: tuple[dict[str, float], ...]

    @staticmethod
    def pack(completions: Sequence[Completion]) -> PackedCompletions:
        lengths = [len(completion.token_ids) for completion in completions]
        return PackedCompletions(
            request_ids=tuple(completion.request_id for completion in completions),
            offsets=_offsets(lengths),
            token_ids=_concatenate(completions, "token_ids", np.int32, lengths),
            logprobs=_concatenate(completions, "logprobs", np.float32, lengths),
            versions=_concatenate(completions, "versions", np.int64, lengths),
            finish_reasons=tuple(completion.finish_reason.value for completion in completions),
            generators=tuple(completion.generator for completion in completions),
            metrics=tuple(completion.metrics for completion in completions),
        )

    def unpack(self) -> list[Completion]:
        bounds = self.offsets.tolist()
        return [
            Completion(
                request_id=request_id,
                token_ids=self.token_ids[bounds[i] : bounds[i + 1]],
                logprobs=self.logprobs[bounds[i] : bounds[i + 1]],
                versions=self.versions[bounds[i] : bounds[i + 1]],
                finish_reason=_FINISH_REASONS[self.finish_reasons[i]],
                generator=self.generators[i],
                metrics=self.metrics[i],
            )
            for i, request_id in enumerate(self.request_ids)
        ]


@dataclass(frozen=True, slots=True)
class PackedPieces(_Packed):
    """Many pieces in one message."""

    request_ids: tuple[str, ...]
    starts: tuple[int, ...]
    offsets: np.ndarray  # [n + 1] int64
    token_ids: np.ndarray  # [sum of lengths] int32
    logprobs: np.ndarray  # [sum of lengths] float32
    versions: np.ndarray  # [sum of lengths] int64

    @staticmethod
    def pack(pieces: Sequence[Piece]) -> PackedPieces:
        lengths = [len(piece.token_ids) for piece in pieces]
        return PackedPieces(
            request_ids=tuple(piece.request_id for piece in pieces),
            starts=tuple(piece.offset for piece in pieces),
            offsets=_offsets(lengths),
            token_ids=_concatenate(pieces, "token_ids", np.int32, lengths),
            logprobs=_concatenate(pieces, "logprobs", np.float32, lengths),
            versions=_concatenate(pieces, "versions", np.int64, lengths),
        )

    def unpack(self) -> list[Piece]:
        bounds = self.offsets.tolist()
        return [
            Piece(
                request_id=request_id,
                offset=self.starts[i],
                token_ids=self.token_ids[bounds[i] : bounds[i + 1]],
                logprobs=self.logprobs[bounds[i] : bounds[i + 1]],
                versions=self.versions[bounds[i] : bounds[i + 1]],
            )
            for i, request_id in enumerate(self.request_ids)
        ]
