"""What holds for every transport, in one process (6 s); several ranks: test_weight_ranks.py."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transport_examples import (
    TRANSPORTS,
    Engine,
    config_of,
    copied,
    publish,
    publisher_of,
    same_bytes,
    weights,
)

from titan_rl.errors import ConfigError, WeightsError
from titan_rl.types import PolicyVersion
from titan_rl.weights.config import WeightsConfig
from titan_rl.weights.filesystem import WEIGHTS
from titan_rl.weights.fingerprint import combined_fingerprint
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.publisher import make_publisher
from titan_rl.weights.puller import WeightPuller, make_reader, scheme, verify
from titan_rl.weights.segment_files import segment_at

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


def part_of(data: torch.Tensor, first: int, length: int) -> TensorShard:
    return TensorShard(name="t", data=data, global_shape=(length,), offset=(first,))


def overwrite(publication: Publication) -> None:
    """Change one byte of the tensor `big` where it was published."""
    entry = next(entry for entry in publication.manifest.entries if entry.name == "big")
    start, path = 0, segment_at(publication.location)
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
    assert [scheme(publication) for publication in published] == ["shm", "file"]


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
    overwrite(publication)
    engine, puller = Engine(), WeightPuller()
    engine.load(puller.tensors(publication))
    with pytest.raises(WeightsError, match="policy v1 is not what the engine computes with: big is not what was pub"):
        verify(publication, engine.served_shards(), None)


def test_what_was_damaged_on_its_way_is_read_anew(transport: str, tmp_path: Path) -> None:
    """Also at the place of the publication before, under its version."""
    publisher = publisher_of(transport, tmp_path)
    engine, puller = Engine(), WeightPuller()
    first = publish(publisher, 1, weights(1))
    engine.load((name, tensor.zero_()) for name, tensor in puller.tensors(first))
    with pytest.raises(WeightsError, match="is not what was published"):
        verify(first, engine.served_shards(), None)
    publisher.release(V1)
    again = publish(publisher, 1, weights(1))
    assert again.manifest == first.manifest
    engine.load(puller.tensors(again))
    assert verify(again, engine.served_shards(), None) == combined_fingerprint(again.manifest)


def test_files_are_what_safetensors_reads_and_outlive_their_publisher(tmp_path: Path) -> None:
    publisher = publisher_of("filesystem", tmp_path)
    publication = publish(publisher, 1, weights(1))
    publisher.close()
    directory = tmp_path / "files" / "policy" / "v1"
    assert [path.name for path in directory.iterdir()] == [WEIGHTS]
    assert same_bytes(load_file(directory / WEIGHTS), weights(1))
    assert same_bytes(copied(make_reader(publication).tensors(publication)), weights(1))


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
    (tmp_path / "files" / "policy" / "v1" / "notes").touch()
    with pytest.raises(WeightsError, match="notes, which would be deleted"):
        publish(publisher_of("filesystem", tmp_path), 1, weights(3))


def test_a_failed_publication_leaves_no_visible_directory(tmp_path: Path) -> None:
    publisher = publisher_of("filesystem", tmp_path)
    publish(publisher, 1, weights(1))
    with pytest.raises(WeightsError, match="3 of 6 elements of t"):
        publisher.publish(V2, [part_of(torch.zeros(3), 0, 6)], dtype=torch.float32)
    channel = tmp_path / "files" / "policy"
    assert [path.name for path in channel.iterdir() if not path.name.startswith(".")] == ["v1"]
    publisher.close()
    assert [path.name for path in channel.iterdir()] == ["v1"]


def test_a_file_shorter_than_its_manifest_says_is_refused(tmp_path: Path) -> None:
    publisher = publisher_of("filesystem", tmp_path)
    publication = publish(publisher, 1, weights(1))
    directory = tmp_path / "files" / "policy" / "v1"
    with open(directory / WEIGHTS, "r+b") as file:
        file.truncate(5000)
    with pytest.raises(WeightsError, match=rf"holds \d+ bytes, its manifest says {publication.manifest.nbytes}"):
        make_reader(publication).tensors(publication)


def test_the_config_chooses_the_publisher_and_the_publication_the_reader(transport: str, tmp_path: Path) -> None:
    config = config_of(transport, tmp_path)
    publisher = make_publisher(config, channel="chosen", rank=0, group=None)
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
