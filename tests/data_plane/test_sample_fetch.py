"""A fetch gives what was stored, or an error that names the group (2 s)."""

import os
import pickle

import pytest
from sample_examples import all_bits, group_of, put, sample_of

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SampleStore, SharedMemorySource, references_in, write_samples
from titan_rl.errors import SampleError


@pytest.fixture
def store(tmp_path):
    store = SampleStore("worker0", owner_pid=77, directory=tmp_path)
    yield store
    store.close()


def test_a_stored_batch_comes_in_its_order_and_outlives_its_store(store):
    samples = [*group_of(3, 50), sample_of(900, group_id=1), *group_of(5, 1, group_id=2)]
    batch = put(store, samples).select([8, 0, 3, 3, 1])
    fetched = SharedMemorySource().fetch(batch)
    store.close()
    assert all_bits(fetched) == all_bits([samples[index] for index in (8, 0, 3, 3, 1)])


def test_samples_that_a_batch_takes_along_come_as_they_are():
    made = SampleBatch.of(group_of(2, 5))
    assert SharedMemorySource().fetch(made) is made.samples


def test_a_missing_file_is_named_with_its_group(store):
    batch = put(store, [sample_of(50, group_id=6)])
    store.close()
    with pytest.raises(SampleError, match="group 6 sample 0: its file .*samples.worker0-0 cannot be read .*No such"):
        SharedMemorySource().fetch(batch)


def test_a_file_that_is_too_short_is_named_with_its_group(store):
    batch = put(store, [sample_of(50, group_id=6)])
    os.truncate(batch.refs[0].location, 100)
    with pytest.raises(SampleError, match="group 6 sample 0: .* holds 100 of its 1056 bytes"):
        SharedMemorySource().fetch(batch)


def test_samples_of_a_checkpoint_come_bit_for_bit(store, tmp_path):
    samples = [*group_of(2, 7, group_id=4), sample_of(20, group_id=5)]
    refs = store.put(samples)
    write_samples(tmp_path / "samples", samples)
    read = references_in(tmp_path / "samples", SampleBatch.of(refs))
    assert all_bits(SharedMemorySource().fetch(read)) == all_bits(samples)


def test_a_sample_error_survives_a_process_boundary_with_its_group():
    error = pickle.loads(pickle.dumps(SampleError("damaged", 12, 3)))
    assert (error.group_id, error.sample, str(error)) == (12, 3, "group 12 sample 3: damaged")
