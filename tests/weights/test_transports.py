"""What holds for every transport, in one process (6 s); several ranks: test_weight_ranks.py and test_rdma_ranks.py."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transport_examples import (
    ALIASES,
    EMBEDDING,
    TRANSPORTS,
    Engine,
    config_of,
    copied,
    publish,
    publisher_of,
    same_bytes,
    weights,
    whole_shards,
)

from titan_rl.errors import ConfigError, WeightsError
from titan_rl.types import PolicyVersion
from titan_rl.weights.config import WeightsConfig
from titan_rl.weights.fingerprint import combined_fingerprint, shard_fingerprint
from titan_rl.weights.manifest import Publication
from titan_rl.weights.puller import WeightPuller
from titan_rl.weights.shards import TensorShard
from titan_rl.weights.transport import make_publisher, make_reader, scheme
from titan_rl.weights.transports.filesystem import MANIFEST, WEIGHTS, read_publication
from titan_rl.weights.transports.publisher import ChannelPublisher
from titan_rl.weights.transports.shared_memory import SharedMemoryReader

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No ibverbs")  # that TCP takes its place is what is tested here
        yield request.param


def part_of(data: torch.Tensor, first: int, length: int) -> TensorShard:
    return TensorShard(name="t", data=data, global_shape=(length,), offset=(first,))


def overwrite(publisher: ChannelPublisher, publication: Publication) -> None:
    """Change one byte of the tensor `big` where it was published."""
    entry = next(entry for entry in publication.manifest.entries if entry.name == "big")
    if scheme(publication) == "rdma":
        publisher._slots[0].content[8000] ^= 1  # type: ignore[attr-defined]
        return
    start, path = 0, Path(publication.location)
    if scheme(publication) == "file":
        path = Path(publication.location.removeprefix("file:")) / WEIGHTS
        start = path.stat().st_size - publication.manifest.nbytes
    with open(path, "r+b") as file:
        file.seek(start + entry.offset + 77)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_reader_sees_exactly_what_was_published_version_after_version(transport: str, tmp_path: Path) -> None:
    publisher = publisher_of(transport, tmp_path)
    reader = None
    for step in range(1, 5):
        publication = publish(publisher, step, weights(step))
        reader = reader or make_reader(publication)
        assert same_bytes(copied(reader.tensors(publication)), weights(step))
        if step > 1:
            publisher.release(PolicyVersion(0, step - 1))
    publisher.close()
    with pytest.raises(WeightsError, match="closed"):
        publish(publisher, 9, weights(9))


def test_all_transports_publish_the_same_version(tmp_path: Path) -> None:
    published = [publish(publisher_of(each, tmp_path), 1, weights(1)) for each in TRANSPORTS]
    assert len({combined_fingerprint(publication.manifest) for publication in published}) == 1
    assert [scheme(publication) for publication in published] == ["", "file", "rdma"]


def test_float32_weights_can_travel_as_bfloat16_and_are_served_as_what_arrives(transport: str, tmp_path: Path) -> None:
    publisher = publisher_of(transport, tmp_path, transfer_dtype=torch.bfloat16)
    publication = publish(publisher, 1, weights(1))
    rounded = {name: tensor.to(torch.bfloat16).to(torch.float32) for name, tensor in weights(1).items()}
    assert same_bytes(copied(make_reader(publication).tensors(publication)), rounded)
    for entry in publication.manifest.entries:
        tensor = rounded[entry.name]
        assert (entry.dtype, entry.stored_dtype, entry.nbytes) == ("float32", "bfloat16", 2 * tensor.numel())
        assert entry.fingerprint == shard_fingerprint(tensor, tensor.shape, (0,) * tensor.dim())
    engine, puller = Engine(), WeightPuller()
    engine.load(puller.tensors(publication))
    assert puller.verify(publication, engine.served_shards(), None) == combined_fingerprint(publication.manifest)


def test_bfloat16_engines_get_bfloat16_whatever_travels(transport: str, tmp_path: Path) -> None:
    publisher = publisher_of(transport, tmp_path, transfer_dtype=torch.bfloat16)
    publication = publisher.publish(V1, whole_shards(weights(1)), dtype=torch.bfloat16)
    served = {name: tensor.to(torch.bfloat16) for name, tensor in weights(1).items()}
    assert same_bytes(copied(make_reader(publication).tensors(publication)), served)
    assert {entry.stored for entry in publication.manifest.entries} == {""}


@settings(deadline=None, max_examples=50)
@given(pattern=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), cut=st.integers(0, 40))
def test_any_float32_is_served_rounded_to_bfloat16_bit_for_bit(
    pattern: list[int], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    master = torch.from_numpy(np.array(pattern, dtype=np.uint32).view(np.float32).copy())
    master = torch.nan_to_num(master, nan=0.0, posinf=torch.inf, neginf=-torch.inf)  # lost weights never get so far
    cut = min(cut, len(master))
    parts = [
        part_of(master[:cut], 0, len(master)),
        part_of(master[cut:], cut, len(master)),
    ]
    publisher = publisher_of("shared_memory", tmp_path_factory.mktemp("segments"), transfer_dtype=torch.bfloat16)
    publication = publisher.publish(V1, parts, dtype=torch.float32)
    expected = master.to(torch.bfloat16).to(torch.float32)
    assert same_bytes(copied(SharedMemoryReader().tensors(publication)), {"t": expected})
    assert publication.manifest.entries[0].fingerprint == shard_fingerprint(expected, expected.shape, (0,))
    publisher.close()


def test_two_channels_know_nothing_of_each_other(transport: str, tmp_path: Path) -> None:
    policy = publisher_of(transport, tmp_path, channel="policy")
    reference = publisher_of(transport, tmp_path, channel="reference")
    kept = publish(reference, 1, weights(100))
    reader = make_reader(kept)
    for step in range(1, 4):
        current = publish(policy, step, weights(step))
        assert same_bytes(copied(reader.tensors(current)), weights(step))
        assert same_bytes(copied(reader.tensors(kept)), weights(100))
        if step > 1:
            policy.release(PolicyVersion(0, step - 1))
    publish(reference, 2, weights(101))
    with pytest.raises(WeightsError, match=r"publishing reference v3: .* max_live is 2; release one of v1, v2"):
        publish(reference, 3, weights(102))
    publish(policy, 4, weights(4))
    policy.close()
    assert same_bytes(copied(reader.tensors(kept)), weights(100))
    reference.close()


def test_a_channel_holds_max_live_versions_and_names_them(transport: str, tmp_path: Path) -> None:
    publisher = publisher_of(transport, tmp_path, max_live=2)
    first = publish(publisher, 1, weights(1))
    publish(publisher, 2, weights(2))
    with pytest.raises(WeightsError, match=r"publishing policy v3: no free segment, max_live is 2; .* v1, v2"):
        publish(publisher, 3, weights(3))
    assert same_bytes(copied(make_reader(first).tensors(first)), weights(1))
    publisher.release(V1)
    third = publish(publisher, 3, weights(3))
    assert same_bytes(copied(make_reader(third).tensors(third)), weights(3))
    with pytest.raises(WeightsError, match="v1 cannot be released: live are v2, v3"):
        publisher.release(V1)


def test_a_byte_that_is_damaged_on_the_way_is_found(transport: str, tmp_path: Path) -> None:
    publisher = publisher_of(transport, tmp_path)
    publication = publish(publisher, 1, weights(1))
    overwrite(publisher, publication)
    engine, puller = Engine(), WeightPuller()
    engine.load(puller.tensors(publication))
    with pytest.raises(WeightsError, match="policy v1 is not what the engine computes with: big is not what was pub"):
        puller.verify(publication, engine.served_shards(), None)


def test_tensors_can_be_left_out(transport: str, tmp_path: Path) -> None:
    publication = publish(publisher_of(transport, tmp_path), 1, weights(1))
    reader = make_reader(publication)
    assert set(dict(reader.tensors(publication, {"big", EMBEDDING}))) == set(weights(1)) - {"big", EMBEDDING}
    assert same_bytes(copied(reader.tensors(publication)), weights(1))


def test_with_delta_only_what_changed_is_loaded_and_everything_verified(transport: str, tmp_path: Path) -> None:
    publisher = publisher_of(transport, tmp_path, delta=True)
    engine, puller = Engine(), WeightPuller()

    def pull(publication: Publication) -> int:
        engine.load(puller.tensors(publication))
        return puller.verify(publication, engine.served_shards(), None)

    tensors = weights(1)
    pull(publish(publisher, 1, tensors))
    assert (sorted(engine.loaded), puller.skipped_bytes) == (sorted(tensors), 0)

    tensors |= {EMBEDDING: weights(2)[EMBEDDING]}
    second = publish(publisher, 2, tensors)
    assert pull(second) == combined_fingerprint(second.manifest)
    assert engine.loaded == [EMBEDDING]
    assert puller.skipped_bytes == sum(4 * tensor.numel() for name, tensor in tensors.items() if name != EMBEDDING)

    publisher.release(V1)
    pull(publish(publisher, 3, tensors))
    assert engine.loaded == []


def test_with_delta_a_change_whose_bits_and_positions_add_up_is_loaded(tmp_path: Path) -> None:
    publisher = publisher_of("shared_memory", tmp_path, delta=True)
    engine, puller = Engine(), WeightPuller()
    first, changed = weights(1), weights(1)
    bits = changed[EMBEDDING].view(torch.int32).view(-1)
    bits[[10, 20]] += 1
    bits[[12, 18]] -= 1
    for step, tensors in ((1, first), (2, changed)):
        publication = publish(publisher, step, tensors)
        engine.load(puller.tensors(publication))
        puller.verify(publication, engine.served_shards(), None)
    assert engine.loaded == [EMBEDDING]
    assert torch.equal(engine.parameters[EMBEDDING], changed[EMBEDDING])


def test_what_was_damaged_on_its_way_is_read_anew(transport: str, tmp_path: Path) -> None:
    """Also at the place of the publication before, under its version."""
    publisher = publisher_of(transport, tmp_path)
    engine, puller = Engine(), WeightPuller()
    first = publish(publisher, 1, weights(1))
    engine.load((name, tensor.zero_()) for name, tensor in puller.tensors(first))
    with pytest.raises(WeightsError, match="is not what was published"):
        puller.verify(first, engine.served_shards(), None)
    publisher.release(V1)
    again = publish(publisher, 1, weights(1))
    assert again.manifest == first.manifest
    engine.load(puller.tensors(again))
    assert puller.verify(again, engine.served_shards(), None) == combined_fingerprint(again.manifest)


def test_without_delta_everything_is_loaded_again(tmp_path: Path) -> None:
    publisher = publisher_of("shared_memory", tmp_path)
    engine, puller = Engine(), WeightPuller()
    for step in (1, 2):
        publication = publish(publisher, step, weights(1))
        engine.load(puller.tensors(publication))
        puller.verify(publication, engine.served_shards(), None)
        assert (sorted(engine.loaded), puller.skipped_bytes) == (sorted(weights(1)), 0)


def test_an_engine_that_lost_what_delta_left_out_is_refused_and_then_loaded_whole(tmp_path: Path) -> None:
    publisher = publisher_of("shared_memory", tmp_path, delta=True, max_live=3)
    engine, puller = Engine(), WeightPuller()
    first = publish(publisher, 1, weights(1))
    engine.load(puller.tensors(first))
    puller.verify(first, engine.served_shards(), None)
    engine.parameters["big"][3, 3] += 1
    second = publish(publisher, 2, weights(1))
    engine.load(puller.tensors(second))
    with pytest.raises(WeightsError, match="v2 is not what the engine computes with: big is not what was published"):
        puller.verify(second, engine.served_shards(), None)
    third = publish(publisher, 3, weights(1))
    engine.load(puller.tensors(third))
    assert (sorted(engine.loaded), puller.skipped_bytes) == (sorted(weights(1)), 0)
    assert puller.verify(third, engine.served_shards(), None) == combined_fingerprint(third.manifest)


def test_files_are_what_safetensors_and_a_later_process_read(tmp_path: Path) -> None:
    publisher = publisher_of("filesystem", tmp_path)
    publication = publish(publisher, 1, weights(1))
    publisher.close()
    directory = tmp_path / "files" / "policy" / "v1"
    assert sorted(path.name for path in directory.iterdir()) == [MANIFEST, WEIGHTS]
    assert same_bytes(load_file(directory / WEIGHTS), weights(1))
    assert read_publication(directory) == publication
    assert read_publication(directory).manifest.aliases == ALIASES
    moved = directory.rename(tmp_path / "elsewhere")
    later = read_publication(moved)
    assert same_bytes(copied(make_reader(later).tensors(later)), weights(1))


def test_a_released_version_has_no_directory_and_its_readers_keep_their_bytes(tmp_path: Path) -> None:
    publisher = publisher_of("filesystem", tmp_path)
    publication = publish(publisher, 1, weights(1))
    views = dict(make_reader(publication).tensors(publication))
    publish(publisher, 2, weights(2))
    publisher.release(V1)
    assert [path.name for path in (tmp_path / "files" / "policy").iterdir()] == ["v2"]
    assert same_bytes(views, weights(1))
    with pytest.raises(WeightsError, match="policy v1 is gone: there is no .*v1"):
        make_reader(publication).tensors(publication)


def test_a_directory_of_an_earlier_run_is_taken_over(tmp_path: Path) -> None:
    publish(publisher_of("filesystem", tmp_path), 1, weights(1))
    (tmp_path / "files" / "policy" / ".v7.partial").mkdir()
    publication = publish(publisher_of("filesystem", tmp_path), 1, weights(2))
    assert [path.name for path in (tmp_path / "files" / "policy").iterdir()] == ["v1"]
    assert same_bytes(copied(make_reader(publication).tensors(publication)), weights(2))


def test_a_failed_publication_leaves_no_visible_directory(tmp_path: Path) -> None:
    publisher = publisher_of("filesystem", tmp_path)
    publish(publisher, 1, weights(1))
    with pytest.raises(WeightsError, match="3 of 6 elements of t"):
        publisher.publish(V2, [part_of(torch.zeros(3), 0, 6)], dtype=torch.float32)
    channel = tmp_path / "files" / "policy"
    assert [path.name for path in channel.iterdir() if not path.name.startswith(".")] == ["v1"]
    publisher.close()
    assert [path.name for path in channel.iterdir()] == ["v1"]


def test_what_is_no_complete_publication_is_refused_by_name(tmp_path: Path) -> None:
    publisher = publisher_of("filesystem", tmp_path)
    publication = publish(publisher, 1, weights(1))
    directory = tmp_path / "files" / "policy" / "v1"
    with pytest.raises(WeightsError, match="is no publication: FileNotFoundError"):
        read_publication(tmp_path)
    with open(directory / WEIGHTS, "r+b") as file:
        file.truncate(5000)
    with pytest.raises(WeightsError, match=rf"holds \d+ bytes, its manifest says {publication.manifest.nbytes}"):
        make_reader(publication).tensors(publication)
    (directory / MANIFEST).write_text(json.dumps({"channel": "policy"}))
    with pytest.raises(WeightsError, match="is no publication: KeyError"):
        read_publication(directory)


def test_the_config_chooses_the_publisher_and_the_publication_the_reader(transport: str, tmp_path: Path) -> None:
    config = config_of(transport, tmp_path)
    publisher = make_publisher(config, channel="chosen", owner_pid=4242, rank=0, group=None)
    try:
        publication = publish(publisher, 1, weights(1))  # type: ignore[arg-type]
        assert same_bytes(copied(make_reader(publication).tensors(publication)), weights(1))
    finally:
        publisher.close()


def test_a_filesystem_without_a_directory_and_no_room_at_all_are_config_errors() -> None:
    with pytest.raises(ConfigError, match='weights.transport = "filesystem" needs weights.directory'):
        WeightsConfig(transport="filesystem")
    with pytest.raises(ConfigError, match="weights.max_live must be at least 2"):
        WeightsConfig(max_live=0)


@pytest.mark.parametrize("channel", ["a/b", "..", ".hidden", ""])
def test_a_channel_is_a_plain_word_everywhere(channel: str, tmp_path: Path) -> None:
    for transport in ("shared_memory", "filesystem"):
        with pytest.raises(ConfigError, match="channel"):
            publisher_of(transport, tmp_path, channel=channel)
