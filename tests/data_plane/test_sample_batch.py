"""A batch of samples and a batch of their references answer alike, but only the first has tokens (1 s)."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_examples import bits, group_of, sample_of

from titan_rl.data_plane.sample_batch import SampleBatch, SampleRef
from titan_rl.data_plane.store import SampleStore
from titan_rl.types import NO_VERSION, PolicyVersion, TrainingSample

INT64 = st.integers(-(2**63), 2**63 - 1)
COUNT = st.integers(0, 2**40)

any_ref = st.builds(
    SampleRef,
    store=st.sampled_from(["worker0", "worker1"]),
    sample_id=COUNT,
    group_id=INT64,
    sample=st.integers(0, 2**31 - 1),
    length=COUNT,
    trained_tokens=COUNT,
    reward=st.floats(allow_nan=False),
    oldest_version=INT64,
    location=st.sampled_from(["/dev/shm/a", "/dev/shm/b"]),
    offset=COUNT,
    checksum=st.integers(0, 2**32 - 1),
)


@pytest.fixture
def both(tmp_path):
    """The same three groups, of 2, 1 and 3 samples, and references to them."""
    samples = [*group_of(2, 7, group_id=4), sample_of(1, group_id=5), *group_of(3, 20, group_id=6)]
    store = SampleStore("worker0", owner_pid=1, directory=tmp_path)
    yield SampleBatch.of(samples), SampleBatch.of(store.put(samples))
    store.close()


def test_numbers_are_the_same_local_and_remote(both):
    local, remote = both
    assert (local.is_local, remote.is_local) == (True, False)
    for name in ("lengths", "trained_tokens", "rewards", "oldest_versions", "group_ids"):
        assert getattr(local, name) == getattr(remote, name), name
    assert len(local) == len(remote) == 6


def test_versions_are_those_of_trained_tokens(both):
    _, remote = both
    assert (
        remote.oldest_versions == [PolicyVersion(1, 5).encode()] * 2 + [NO_VERSION] + [PolicyVersion(1, 5).encode()] * 3
    )


def test_references_are_no_samples_and_samples_no_references(both):
    local, remote = both
    with pytest.raises(ValueError, match="these are references to 6 samples"):
        _ = remote.samples
    with pytest.raises(ValueError, match="these 6 samples are in no store"):
        _ = local.refs


@given(st.data())
def test_operations_return_new_batches_and_keep_the_order(data):
    local = SampleBatch.of(group_of(data.draw(st.integers(0, 6)), 3))
    indices = data.draw(st.lists(st.sampled_from(range(len(local))), max_size=8)) if len(local) else []
    assert local.select(indices).samples == tuple(local.samples[index] for index in indices)
    cut = data.draw(st.integers(0, len(local)))
    parts = [local.select(range(cut)), local.select(range(cut, len(local)))]
    assert SampleBatch.concat(parts).samples == local.samples


def test_batches_of_both_kinds_are_not_joined_but_empty_ones_go_with_any(both):
    local, remote = both
    with pytest.raises(ValueError, match="cannot be one batch"):
        SampleBatch.concat([local, remote])
    assert SampleBatch.concat([SampleBatch.of([]), remote]).refs == remote.refs
    empty = SampleBatch.concat([remote.select([]), local.select([])])
    assert (empty.samples, empty.refs, len(empty)) == ((), (), 0)


def test_what_to_release_is_named_once_per_store(both, tmp_path):
    local, remote = both
    other = SampleStore("worker1", owner_pid=1, directory=tmp_path)
    more = SampleBatch.of(other.put([sample_of(2)]))
    assert SampleBatch.concat([remote, more, remote]).stored_ids == {"worker0": (0, 1, 2, 3, 4, 5), "worker1": (0,)}
    assert local.stored_ids == {}


@given(st.lists(any_ref, max_size=6))
def test_references_come_through_a_message_equal(refs):
    assert pickle.loads(pickle.dumps(SampleBatch.of(refs))).refs == tuple(refs)


def test_a_local_batch_comes_through_a_message_bit_for_bit(both):
    copy = pickle.loads(pickle.dumps(both[0]))
    assert [bits(sample) for sample in copy.samples] == [bits(sample) for sample in both[0].samples]


@pytest.mark.parametrize("length", [16, 16_000])
def test_a_reference_takes_less_than_100_bytes_in_a_message_whatever_the_length(length, tmp_path):
    store = SampleStore("worker0.123456", owner_pid=123456, directory=tmp_path)
    samples: list[TrainingSample] = group_of(8, length)
    message = pickle.dumps(SampleBatch.of(store.put(samples)))
    store.close()
    assert len(message) / 8 < 100
