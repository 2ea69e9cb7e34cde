"""A batch answers alike whether its samples are stored or taken along (1 s)."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_examples import bits, group_of, sample_of

from titan_rl.data_plane.sample_batch import SampleBatch, SampleRef, reference_to
from titan_rl.data_plane.store import SampleStore
from titan_rl.types import NO_VERSION, PolicyVersion

REFS = st.builds(
    SampleRef,
    store=st.text(max_size=3),
    sample_id=st.integers(0, 2**63),
    group_id=st.integers(0, 2**40),
    sample=st.integers(0, 2**40),
    length=st.integers(0, 2**40),
    trained_tokens=st.integers(0, 2**40),
    reward=st.floats(),
    oldest_version=st.integers(-1, 2**63 - 1),
    location=st.text(max_size=3),
    offset=st.integers(0, 2**40),
    checksum=st.integers(0, 2**64 - 1),
    advantage=st.floats(),
    support_bytes=st.integers(0, 2**40),
    route_shape=st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)),
    unrouted=st.integers(0, 2**40),
)


@pytest.fixture
def both(tmp_path):
    """The same three groups, of 2, 1 and 3 samples: taken along, and stored."""
    samples = [*group_of(2, 7, group_id=4), sample_of(1, group_id=5), *group_of(3, 20, group_id=6)]
    store = SampleStore("worker0", owner_pid=1, directory=tmp_path)
    yield SampleBatch.of(samples), SampleBatch.of(store.put(samples))
    store.close()


def test_numbers_are_the_same_wherever_the_samples_are(both):
    made, stored = both
    for name in ("lengths", "trained_tokens", "oldest_versions", "group_ids"):
        assert getattr(made, name) == getattr(stored, name), name
    assert len(made) == len(stored) == 6
    oldest = PolicyVersion(1, 5).encode()
    assert stored.oldest_versions == [oldest] * 2 + [NO_VERSION] + [oldest] * 3


@given(st.data())
def test_operations_return_new_batches_and_keep_the_order(data):
    samples = group_of(data.draw(st.integers(1, 6)), 3)
    batch = SampleBatch.of(samples)
    indices = data.draw(st.lists(st.sampled_from(range(len(batch))), max_size=8))
    chosen = batch.select(indices)
    assert chosen.samples == tuple(samples[index] for index in indices)
    assert chosen.refs == tuple(batch.refs[index] for index in indices)
    cut = data.draw(st.integers(0, len(batch)))
    parts = [batch.select(range(cut)), batch.select(range(cut, len(batch)))]
    assert SampleBatch.concat(parts) == batch


def test_stored_samples_are_not_joined_with_others_but_empty_batches_go_with_any(both):
    made, stored = both
    with pytest.raises(ValueError, match="cannot be one batch"):
        SampleBatch.concat([made, stored])
    assert SampleBatch.concat([SampleBatch.of([]), made.select([]), stored]) == stored
    assert len(SampleBatch.concat([stored.select([]), made.select([])])) == 0


def test_what_to_release_is_named_once_per_store(both, tmp_path):
    made, stored = both
    other = SampleStore("worker1", owner_pid=1, directory=tmp_path)
    more = SampleBatch.of(other.put([sample_of(2)]))
    assert SampleBatch.concat([stored, more, stored]).stored_ids == {"worker0": (0, 1, 2, 3, 4, 5), "worker1": (0,)}
    assert made.stored_ids == {}


def test_a_batch_comes_through_a_message_bit_for_bit(both):
    made, stored = both
    assert pickle.loads(pickle.dumps(stored)) == stored
    copy = pickle.loads(pickle.dumps(made))
    assert [bits(sample) for sample in copy.samples] == [bits(sample) for sample in made.samples]


@given(st.lists(REFS, max_size=4))
def test_references_come_through_a_message_with_every_bit_and_sign(refs):
    batch = SampleBatch.of(refs)
    assert repr(pickle.loads(pickle.dumps(batch))) == repr(batch)


def test_a_script_may_give_numbers_of_numpy():
    sample = replace(sample_of(3), advantages=np.float64(0.1), reward=np.float32(0.1))
    batch = SampleBatch([reference_to(sample)])
    assert pickle.loads(pickle.dumps(batch)).refs == tuple(batch.refs)
