"""The flat layout gives back what it was given, or an error that names the sample (2 s)."""

import dataclasses
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sample_examples import bits, sample_of

from titan_rl.data_plane.layout import ALIGNMENT, checksum_of, decode, encode, encoded_size
from titan_rl.errors import SampleError
from titan_rl.types import TrainingSample

INT64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def any_sample(draw: st.DrawFn) -> TrainingSample:
    """Any bits in any field."""
    length = draw(st.integers(0, 40))
    mask = draw(arrays.arrays(np.bool_, length))
    mask[:1] = False
    return TrainingSample(
        group_id=draw(INT64),
        sample=draw(INT64),
        token_ids=draw(arrays.arrays(np.int32, length)),
        loss_mask=mask,
        logprobs=draw(arrays.arrays(np.float32, length)),
        versions=draw(arrays.arrays(np.int64, length)),
        advantage=draw(st.floats()),
        reward=draw(st.floats()),
    )


def encoded(sample: TrainingSample) -> tuple[bytearray, int]:
    content, (checksum,) = encode([sample])
    return bytearray(content), checksum


@given(any_sample())
@settings(deadline=None)
def test_every_sample_comes_back_bit_for_bit(sample):
    buffer, checksum = encoded(sample)
    assert len(buffer) == encoded_size(len(sample.token_ids)) and len(buffer) % ALIGNMENT == 0
    assert bits(decode(buffer, checksum, group_id=sample.group_id, sample=sample.sample)) == bits(sample)


@given(any_sample(), st.data())
@settings(deadline=None)
def test_any_changed_byte_is_found_and_the_group_named(sample, data):
    buffer, checksum = encoded(sample)
    buffer[data.draw(st.integers(0, len(buffer) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(SampleError) as error:
        decode(buffer, checksum, group_id=sample.group_id, sample=sample.sample)
    assert (error.value.group_id, error.value.sample) == (sample.group_id, sample.sample)
    assert f"group {sample.group_id} sample {sample.sample}: " in str(error.value)


@given(st.integers(30_000, 80_000), st.data())
@settings(deadline=None, max_examples=50)
def test_damage_to_a_large_sample_is_found_wherever_it_is(size, data):
    buffer = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    before = checksum_of(buffer.data)
    at = st.integers(0, size - 1)
    match data.draw(st.sampled_from(["one bit", "same bit twice", "swapped rows", "swapped words", "stale tail"])):
        case "one bit":
            buffer[data.draw(at)] ^= 1 << data.draw(st.integers(0, 7))
        case "same bit twice":  # in one column of the folded table, or anywhere
            first = data.draw(st.integers(0, 4095))
            buffer[first] ^= 4
            buffer[first + 2048 * data.draw(st.integers(1, 12))] ^= 4
        case "swapped rows":
            buffer[:4096] = np.roll(buffer[:4096], 2048)
        case "swapped words":
            buffer[:16] = np.roll(buffer[:16], 8)
        case "stale tail":
            buffer[data.draw(st.integers(0, size - 9)) :] = 0
    assert checksum_of(buffer.data) != before


def test_samples_follow_each_other_as_each_would_be_alone():
    samples = [sample_of(5), sample_of(0), sample_of(12)]
    alone = [encoded(sample) for sample in samples]
    assert encode(samples) == (b"".join(content for content, _ in alone), [checksum for _, checksum in alone])


def test_arrays_that_are_no_run_of_memory_are_stored_as_what_they_hold():
    sample = sample_of(5)
    names = ("token_ids", "loss_mask", "logprobs", "versions")
    strided = dataclasses.replace(sample, **{name: np.repeat(getattr(sample, name), 2)[::2] for name in names})
    assert not strided.token_ids.flags.c_contiguous and encoded(strided) == encoded(sample)


def test_an_intact_sample_in_the_place_of_another_is_refused():
    buffer, checksum = encoded(sample_of(5, group_id=3, sample=1))
    with pytest.raises(SampleError, match="group 4 sample 1: found group 3 sample 1"):
        decode(buffer, checksum, group_id=4, sample=1)


@pytest.mark.parametrize("content", [bytes(48), bytes(8), b""])
def test_bytes_that_are_no_sample_are_refused_even_if_their_checksum_fits(content):
    with pytest.raises(SampleError, match="group 7 sample 0: .*no sample"):
        decode(content, zlib.crc32(content), group_id=7, sample=0)


def test_another_dtype_is_refused():
    sample = sample_of(5, group_id=9)
    wide = TrainingSample(
        **{name: getattr(sample, name) for name in sample.__dataclass_fields__}
        | {"token_ids": sample.token_ids.astype(np.int64)}
    )
    with pytest.raises(ValueError, match="group 9 sample 0: token_ids is int64"):
        encoded(wide)
