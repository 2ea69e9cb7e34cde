"""A store keeps bytes until they are released, once, and not longer; its layout gives back what it was given (4 s)."""

import dataclasses
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from sample_examples import all_bits, bits, group_of, put, sample_of, supports_of

from titan_rl.data_plane.sample_batch import SampleBatch, SampleRef, encoded_size, reference_to
from titan_rl.data_plane.store import SampleStore, SharedMemorySource, decode, encode
from titan_rl.errors import ConfigError, InvariantError, SampleError, SampleStoreFull, SharedMemoryFull
from titan_rl.types import TrainingSample


def store_in(directory, name="worker0", **settings):
    return SampleStore(name, owner_pid=77, directory=directory, **settings)


def ids_of(batch):
    return list(batch.stored_ids.get("worker0", ()))


class AnyOrder(RuleBasedStateMachine):
    """Random puts and releases; what is held must always be readable as it was stored."""

    @initialize()
    def begin(self):
        self.directory = tempfile.TemporaryDirectory()
        self.bound = 24_000
        self.store = store_in(Path(self.directory.name), max_bytes=self.bound)
        self.stored = {}  # id -> (sample, reference)
        self.group_id = 0

    @property
    def nbytes(self):
        return sum(ref.nbytes for _, ref in self.stored.values())

    @rule(count=st.integers(0, 4), length=st.sampled_from([1, 16, 60, 200, 300]), truncated=st.booleans())
    def put(self, count, length, truncated):
        self.group_id += 1
        samples = group_of(count, length, group_id=self.group_id, truncated=truncated)
        fits = self.nbytes + sum(reference_to(sample).nbytes for sample in samples) <= self.bound
        try:
            refs = self.store.put(samples)
        except SampleStoreFull:
            assert not fits
            return
        assert fits
        assert not self.stored.keys() & {ref.sample_id for ref in refs}
        self.stored.update((ref.sample_id, (sample, ref)) for ref, sample in zip(refs, samples, strict=True))

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def release(self, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.stored)), unique=True, max_size=3))
        self.store.release(ids)
        for sample_id in ids:
            del self.stored[sample_id]

    @rule()
    def everything_held_is_as_it_was_stored(self):
        batch = SampleBatch.of(ref for _, ref in self.stored.values())
        samples = [sample for sample, _ in self.stored.values()]
        assert all_bits(SharedMemorySource().fetch(batch)) == all_bits(samples)
        report = self.store.held()
        assert (report.samples, report.nbytes) == (len(self.stored), self.nbytes)
        files = {ref.location for _, ref in self.stored.values()}
        assert {str(path) for path in Path(self.directory.name).iterdir()} == files

    def teardown(self):
        if hasattr(self, "store"):
            self.everything_held_is_as_it_was_stored()
            self.store.release(sorted(self.stored))
            assert os.listdir(self.directory.name) == []
            assert self.store.close().samples == 0
            self.directory.cleanup()


AnyOrder.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([0], "sample id 0 cannot be released: it was released before"),
        ([1, 7], "sample id 7 cannot be released: it never existed"),
        ([1, 1], "sample id 1 is to be released twice in one call"),
    ],
)
def test_a_release_that_cannot_be_is_refused_by_id_and_releases_nothing(tmp_path, ids, sentence):
    store = store_in(tmp_path)
    put(store, group_of(2, 10))
    store.release([0])
    with pytest.raises(InvariantError, match=f"worker0: {sentence}"):
        store.release(ids)
    assert store.held().samples == 1


def test_reading_gives_the_bytes_of_these_samples_in_their_order(tmp_path):
    store = store_in(tmp_path)
    refs = store.put(group_of(3, 10))
    content = Path(refs[0].location).read_bytes()
    read = store.read([2, 0])
    assert read.tobytes() == content[refs[2].offset :] + content[: refs[0].nbytes]
    store.release([2])
    with pytest.raises(InvariantError, match="sample id 2 cannot be read: it was released before"):
        store.read([0, 2])


def test_a_put_beyond_the_bound_keeps_nothing_and_names_the_setting(tmp_path):
    store = store_in(tmp_path, max_bytes=6000)
    store.put([sample_of(50)])
    with pytest.raises(SampleStoreFull, match=r"sample store worker0: no room .* bound is 6000 .data_plane.store_mib"):
        put(store, group_of(10, 50))
    assert store.held().samples == 1
    put(store, group_of(4, 50))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_host_without_room_is_an_error_that_leaves_no_file(tmp_path, monkeypatch):
    store, opened = store_in(tmp_path), os.open

    def full(path, *arguments):
        os.close(opened(path, *arguments))
        return opened("/dev/full", os.O_WRONLY)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(SharedMemoryFull, match=r"do not fit in .* bytes are free .No space left on device."):
        put(store, [sample_of(10)])
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []
    assert store.held().nbytes == 0
    put(store, [sample_of(10)])


def test_two_stores_of_one_name_are_an_error(tmp_path):
    put(store_in(tmp_path), [sample_of(10)])
    with pytest.raises(ConfigError, match="two sample stores have one name"):
        put(store_in(tmp_path), [sample_of(10)])


def test_closing_removes_all_files_and_tells_what_was_held(tmp_path):
    store = store_in(tmp_path)
    batch = put(store, group_of(2, 10, group_id=3))
    put(store, [sample_of(4000, group_id=4)])
    store.release(ids_of(batch)[:1])
    report = store.close()
    assert str(report).startswith("worker0: 1 samples of group 3, 1 samples of group 4, ")
    assert list(tmp_path.iterdir()) == []
    assert store.close().samples == 0
    with pytest.raises(InvariantError, match="worker0 is closed"):
        put(store, [sample_of(4)])


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
        advantages=draw(arrays.arrays(np.float32, length)),
        reward=draw(st.floats()),
        supports=draw(st.none() | st.just(supports_of(mask, np.random.default_rng(length)))),
    )


def encoded(sample: TrainingSample) -> tuple[bytearray, SampleRef]:
    content, (checksum,) = encode([sample])
    return bytearray(content), reference_to(sample)._replace(checksum=checksum)


@given(any_sample())
@settings(deadline=None)
def test_every_sample_comes_back_bit_for_bit(sample):
    buffer, ref = encoded(sample)
    assert len(buffer) == ref.nbytes
    assert sample.supports is not None or ref.nbytes == encoded_size(len(sample.token_ids))
    assert bits(decode(buffer, ref)) == bits(sample)


@given(any_sample().filter(lambda sample: len(sample.token_ids)), st.data())
@settings(deadline=None)
def test_any_changed_byte_is_found_and_the_group_named(sample, data):
    buffer, ref = encoded(sample)
    buffer[data.draw(st.integers(0, len(buffer) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(SampleError) as error:
        decode(buffer, ref)
    assert (error.value.group_id, error.value.sample) == (sample.group_id, sample.sample)
    assert f"group {sample.group_id} sample {sample.sample}: " in str(error.value)


def test_samples_follow_each_other_as_each_would_be_alone():
    samples = [sample_of(5), sample_of(0), sample_of(12)]
    alone = [encoded(sample) for sample in samples]
    assert encode(samples) == (b"".join(content for content, _ in alone), [ref.checksum for _, ref in alone])


def test_arrays_that_are_no_run_of_memory_are_stored_as_what_they_hold():
    sample = sample_of(5)
    names = ("token_ids", "loss_mask", "logprobs", "versions")
    strided = dataclasses.replace(sample, **{name: np.repeat(getattr(sample, name), 2)[::2] for name in names})
    assert not strided.token_ids.flags.c_contiguous and encoded(strided) == encoded(sample)
