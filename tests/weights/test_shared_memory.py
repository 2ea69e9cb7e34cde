"""Publishing and reading in one process (2 s); several ranks are in test_weight_ranks.py."""

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from weight_examples import Engine, copied, publish, publisher_in, same_bytes, shard_fingerprint, weights, whole_shards

from titan_rl.errors import WeightsError
from titan_rl.processes import OWNER
from titan_rl.types import PolicyVersion
from titan_rl.weights.fingerprint import combined_fingerprint
from titan_rl.weights.manifest import TensorShard
from titan_rl.weights.puller import SharedMemoryReader, verify
from titan_rl.weights.segment_files import remove_segments_of, segment_at, sweep_dead_segments

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    gc.collect()


def test_weights_are_cast_to_what_is_served_and_fingerprinted_after_that(directory: Path) -> None:
    publisher, reader = publisher_in(directory), SharedMemoryReader()
    publication = publisher.publish(V1, whole_shards(weights(1)), dtype=torch.bfloat16)
    served = {name: tensor.to(torch.bfloat16) for name, tensor in weights(1).items()}
    assert same_bytes(copied(reader.tensors(publication)), served)
    for entry in publication.manifest.entries:
        tensor = served[entry.name]
        assert entry.dtype == "bfloat16"
        assert entry.fingerprint == shard_fingerprint(tensor, tensor.shape, (0,) * tensor.dim())


def test_entries_lie_in_order_of_name_at_aligned_offsets_without_overlap(directory: Path) -> None:
    manifest = publisher_in(directory).publish(V1, whole_shards(weights(1)), dtype=torch.float32).manifest
    assert [entry.name for entry in manifest.entries] == sorted(weights(1))
    end = 0
    for entry in manifest.entries:
        assert entry.offset % 64 == 0 and entry.offset >= end
        end = entry.offset + entry.nbytes
    assert manifest.nbytes >= end


def test_an_alias_is_named_in_the_manifest_and_not_read_twice(directory: Path) -> None:
    publisher, reader = publisher_in(directory), SharedMemoryReader()
    aliases = (("lm_head.weight", "model.embed_tokens.weight"),)
    publication = publisher.publish(V1, whole_shards(weights(1)), dtype=torch.float32, aliases=aliases)
    assert publication.manifest.aliases == aliases
    assert set(dict(reader.tensors(publication))) == set(weights(1))


def test_segments_are_recycled_and_readers_keep_their_mapping(directory: Path) -> None:
    publisher, reader = publisher_in(directory), SharedMemoryReader()
    addresses: dict[str, set[int]] = {}
    for step in range(1, 8):
        version = PolicyVersion(0, step)
        publication = publisher.publish(version, whole_shards(weights(step)), dtype=torch.float32)
        assert same_bytes(copied(reader.tensors(publication)), weights(step))
        addresses.setdefault(publication.location, set()).add(dict(reader.tensors(publication))["big"].data_ptr())
        if step > 1:
            publisher.release(PolicyVersion(0, step - 1))
    assert len(list(directory.iterdir())) == 2
    assert [len(seen) for seen in addresses.values()] == [1, 1]


def test_a_larger_publication_gets_a_larger_segment_and_readers_follow(directory: Path) -> None:
    publisher, reader = publisher_in(directory, max_live=1), SharedMemoryReader()
    small = publisher.publish(V1, whole_shards(weights(1)), dtype=torch.bfloat16)
    before = dict(reader.tensors(small))["big"]
    kept = before.clone()
    publisher.release(V1)
    large = publisher.publish(V2, whole_shards(weights(2)), dtype=torch.float32)
    assert large.location == small.location
    assert same_bytes(copied(reader.tensors(large)), weights(2))
    assert torch.equal(before, kept)


def test_a_publisher_that_starts_again_takes_the_place_of_the_old_one(directory: Path) -> None:
    reader = SharedMemoryReader()
    old = publisher_in(directory).publish(V1, whole_shards(weights(1)), dtype=torch.float32)
    assert same_bytes(copied(reader.tensors(old)), weights(1))
    new = publisher_in(directory).publish(PolicyVersion(1, 0), whole_shards(weights(2)), dtype=torch.float32)
    assert new.location == old.location
    assert same_bytes(copied(reader.tensors(new)), weights(2))


def test_a_successor_releases_what_the_publisher_before_left_live_and_reuses_all_room(directory: Path) -> None:
    dead, reader = publisher_in(directory, max_live=3), SharedMemoryReader()
    v1, v2, _ = (
        dead.publish(version, whole_shards(weights(version.step)), dtype=torch.float32)
        for version in (V1, V2, PolicyVersion(0, 3))
    )
    publisher = publisher_in(directory, max_live=3)
    publisher.adopt([v1, v2])  # nobody heard of v3
    v3 = publisher.publish(PolicyVersion(0, 3), whole_shards(weights(3)), dtype=torch.float32)
    for publication, seed in ((v1, 1), (v2, 2), (v3, 3)):
        assert same_bytes(copied(reader.tensors(publication)), weights(seed))
    publisher.release(V1)
    v4 = publisher.publish(PolicyVersion(0, 4), whole_shards(weights(4)), dtype=torch.float32)
    assert same_bytes(copied(reader.tensors(v4)), weights(4))
    assert same_bytes(copied(reader.tensors(v2)), weights(2))
    assert len(list(directory.iterdir())) == 3


def test_elements_that_no_shard_holds_are_an_error(directory: Path) -> None:
    publisher, reader = publisher_in(directory), SharedMemoryReader()
    first = publisher.publish(V1, whole_shards(weights(1)), dtype=torch.float32)
    half = TensorShard(name="big", data=torch.zeros(700, 300), global_shape=(1500, 300), offset=(0, 0))
    with pytest.raises(WeightsError, match="publishing policy v2: .* 210000 of 450000 elements of big"):
        publisher.publish(V2, [half], dtype=torch.float32)
    assert same_bytes(copied(reader.tensors(first)), weights(1))


def test_a_replica_is_not_written(directory: Path) -> None:
    replica = TensorShard(name="a", data=torch.ones(3), global_shape=(3,), offset=(0,), counted=False)
    counted = TensorShard(name="a", data=torch.zeros(3), global_shape=(3,), offset=(0,))
    publication = publisher_in(directory).publish(V1, [counted, replica], dtype=torch.float32)
    assert same_bytes(copied(SharedMemoryReader().tensors(publication)), {"a": torch.zeros(3)})


def test_nothing_to_publish_and_dtypes_that_are_not_served_are_errors(directory: Path) -> None:
    publisher = publisher_in(directory)
    with pytest.raises(WeightsError, match="there are no tensors"):
        publisher.publish(V1, [], dtype=torch.float32)
    with pytest.raises(WeightsError, match="no fingerprint of torch.float16"):
        publisher.publish(V1, whole_shards(weights(1)), dtype=torch.float16)


def test_too_little_shared_memory_is_an_error_that_says_how_much_is_needed() -> None:
    huge = TensorShard(name="huge", data=torch.zeros(0), global_shape=(1 << 50,), offset=(0,))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        with pytest.raises(WeightsError, match=rf"{4 << 30} MiB does not fit in {directory}, where \d+ MiB are free"):
            publisher_in(Path(directory)).publish(V1, [huge], dtype=torch.float32)
        assert not os.listdir(directory)


def test_closing_removes_the_files_and_ends_publishing_while_views_stay_valid(directory: Path) -> None:
    publisher, reader = publisher_in(directory), SharedMemoryReader()
    publication = publisher.publish(V1, whole_shards(weights(1)), dtype=torch.float32)
    views = dict(reader.tensors(publication))
    publisher.close()
    publisher.close()
    assert not list(directory.iterdir())
    assert same_bytes(views, weights(1))
    with pytest.raises(WeightsError, match="closed"):
        publisher.publish(V2, whole_shards(weights(2)), dtype=torch.float32)
    with pytest.raises(WeightsError, match="policy v1 is gone"):
        reader.tensors(publication)


@pytest.mark.parametrize(("left", "reason"), [(0, "is gone"), (4096, "holds 4096 bytes")])
def test_a_file_that_was_cut_short_is_an_error_and_kills_nobody(directory: Path, left: int, reason: str) -> None:
    publication = publisher_in(directory).publish(V1, whole_shards(weights(0)), dtype=torch.float32)
    had_mapped_it, new = SharedMemoryReader(), SharedMemoryReader()
    copied(had_mapped_it.tensors(publication))
    os.truncate(segment_at(publication.location), left)
    for reader in (had_mapped_it, new):
        with pytest.raises(WeightsError, match=f"policy v1.* {reason}"):
            reader.tensors(publication)


def test_sweeping_removes_the_files_of_dead_owners_only(directory: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    kept = ["titan_rl-notes", f"titan_rl-{dead.pid}-policy-0.bak", f"other-{dead.pid}-policy-0"]
    kept += [f"titan_rl-{os.getpid()}-policy-0", "titan_rl-1-policy-0"]
    swept = [f"titan_rl-{dead.pid}-policy-0", f"titan_rl-{dead.pid}-other.policy-12"]
    for name in kept + swept:
        (directory / name).touch()
    assert sorted(path.name for path in sweep_dead_segments(directory)) == sorted(swept)
    assert sorted(path.name for path in directory.iterdir()) == sorted(kept)
    assert sweep_dead_segments(directory) == []


def test_a_publication_has_one_location_and_a_file_of_each_hosts_owner(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them can be removed by another process."""
    locations = set()
    for owner in ("11", "12"):
        monkeypatch.setenv(OWNER, owner)
        published = publisher_in(directory).publish(V1, whole_shards(weights(1)), dtype=torch.float32)
        locations.add(published.location)
    assert [path.name for path in remove_segments_of(11, directory)] == ["titan_rl-11-policy-0"]
    assert list(directory.iterdir()) == [segment_at(*locations)]


def test_file_names_need_neither_torch_nor_numba() -> None:
    code = "import sys, titan_rl.weights.segment_files; print({'torch', 'numba', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_two_channels_know_nothing_of_each_other(directory: Path) -> None:
    policy, reference = publisher_in(directory, channel="policy"), publisher_in(directory, channel="reference")
    kept, reader = publish(reference, 1, weights(100)), SharedMemoryReader()
    for step in range(1, 4):
        current = publish(policy, step, weights(step))
        assert same_bytes(copied(reader.tensors(current)), weights(step))
        assert same_bytes(copied(reader.tensors(kept)), weights(100))
        if step > 1:
            policy.release(PolicyVersion(0, step - 1))
    policy.close()
    assert same_bytes(copied(reader.tensors(kept)), weights(100))


def test_a_channel_holds_max_live_versions_and_names_them(directory: Path) -> None:
    publisher, reader = publisher_in(directory), SharedMemoryReader()
    first = publish(publisher, 1, weights(1))
    publish(publisher, 2, weights(2))
    with pytest.raises(WeightsError, match="published already"):
        publish(publisher, 1, weights(2))
    with pytest.raises(WeightsError, match=r"publishing policy v3: no free segment, max_live is 2; .* v1, v2"):
        publish(publisher, 3, weights(3))
    assert same_bytes(copied(reader.tensors(first)), weights(1))
    publisher.release(V1)
    third = publish(publisher, 3, weights(3))
    assert same_bytes(copied(reader.tensors(third)), weights(3))
    with pytest.raises(WeightsError, match="v1 cannot be released: live are v2, v3"):
        publisher.release(V1)


def test_what_was_damaged_on_its_way_is_read_anew(directory: Path) -> None:
    """Also at the place of the publication before, under its version."""
    publisher, engine, reader = publisher_in(directory), Engine(), SharedMemoryReader()
    first = publish(publisher, 1, weights(1))
    engine.load((name, tensor.zero_()) for name, tensor in reader.tensors(first))
    with pytest.raises(WeightsError, match="is not what was published"):
        verify(first, engine.served_shards(), None)
    publisher.release(V1)
    again = publish(publisher, 1, weights(1))
    assert again.manifest == first.manifest
    engine.load(reader.tensors(again))
    assert verify(again, engine.served_shards(), None) == combined_fingerprint(again.manifest)
