"""Completions that stream through the router: real actors, scripted generators. About 4 s."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from router_fleet import SECONDS, Fleet, request

from titan_rl.actors.router import GeneratorRouter
from titan_rl.errors import GeneratorFailed, RequestLost
from titan_rl.routing.config import RouterConfig
from titan_rl.types import Completion, FinishReason, Piece, PolicyVersion

Stream = AsyncGenerator[Piece | Completion, None]


async def next_piece(stream: Stream) -> Piece:
    piece = await asyncio.wait_for(anext(stream), SECONDS)
    assert isinstance(piece, Piece)
    return piece


async def to_the_end(stream: Stream, pieces: list[Piece]) -> Completion:
    """Collect what is left; asserts that the pieces are the completion."""
    completion: Completion | None = None
    async for each in stream:
        assert completion is None, "nothing comes after the completion"
        if isinstance(each, Piece):
            pieces.append(each)
        else:
            completion = each
    assert completion is not None
    position = 0
    for piece in pieces:
        assert (piece.request_id, piece.offset) == (completion.request_id, position)
        position = piece.end
    for name in ("token_ids", "logprobs", "versions"):
        joined = [value for piece in pieces for value in getattr(piece, name).tolist()]
        assert joined == getattr(completion, name).tolist()
    return completion


def sending(stream: Stream) -> asyncio.Task[Piece]:
    """The first piece; the request is on its way."""
    return asyncio.create_task(next_piece(stream))


async def test_pieces_come_before_the_completion_ends(swapping: Fleet) -> None:
    stream = swapping.stream(request("s"))
    first = sending(stream)
    await swapping.live(0, 1)
    other = swapping.generate(request("other"))
    await swapping.on(0, "progress", 2)
    assert (await first).token_ids.tolist() == [3, 4]
    await swapping.on(0, "progress", 3)
    second = await next_piece(stream)
    assert (second.offset, second.token_ids.tolist()) == (2, [5])
    await swapping.on(0, "finish", ["s"], 5)
    completion = await to_the_end(stream, [await first, second])
    assert completion.token_ids.tolist() == [3, 4, 5, 6, 7] and completion.finish_reason is FinishReason.STOP
    await swapping.live(1, 1)
    await swapping.on(1, "finish", ["other"], 2)
    assert len((await other).token_ids) == 2
    await swapping.in_flight(0)


async def test_a_hot_swap_changes_the_versions_of_a_stream_and_not_its_positions(swapping: Fleet) -> None:
    stream = swapping.stream(request("s"))
    first = sending(stream)
    await swapping.live(0, 1)
    await swapping.on(0, "progress", 2)
    pieces = [await first]
    await swapping.pull(1)
    await swapping.on(0, "progress", 4)
    pieces.append(await next_piece(stream))
    assert [piece.offset for piece in pieces] == [0, 2]
    old, new = (PolicyVersion(0, step).encode() for step in range(2))
    assert [piece.versions.tolist() for piece in pieces] == [[old] * 2, [new] * 2]
    await stream.aclose()
    await swapping.in_flight(0)


async def test_a_stream_that_is_interrupted_goes_on_elsewhere_where_it_was() -> None:
    async with Fleet(RouterConfig(strategy="round_robin", max_syncing=1, drain_seconds=0.05)) as fleet:
        stream = fleet.stream(request("s"))
        first = sending(stream)
        await fleet.live(0, 1)
        await fleet.on(0, "progress", 3)
        pieces = [await first]
        await fleet.on(0, "hold_pulls")
        pull = fleet.pull(1)
        (attempt,) = (await fleet.live(1, 1)).values()
        assert attempt.stream_from == 3 and attempt.prompt_token_ids.tolist() == [0, 1, 2, 3, 4, 5]
        assert (attempt.sampling.max_new_tokens, attempt.seed) == (9 - 3, 7)
        await fleet.on(1, "progress", 2)
        pieces.append(await next_piece(stream))
        assert (pieces[-1].offset, pieces[-1].token_ids.tolist()) == (3, [6, 7])
        await fleet.on(1, "finish", [attempt.request_id], 3)
        completion = await to_the_end(stream, pieces)
        assert completion.token_ids.tolist() == [3, 4, 5, 6, 7, 8]
        await fleet.on(0, "release_pulls")
        await pull


async def test_what_was_streamed_survives_its_generator(swapping: Fleet) -> None:
    stream = swapping.stream(request("s"))
    whole = swapping.generate(request("whole"))
    first = sending(stream)
    await swapping.live(0, 1)
    await swapping.live(1, 1)
    for index in range(2):
        await swapping.on(index, "progress", 4)
    pieces = [await first]
    home = await swapping.until_runs("s")
    await swapping.on(home, "die")
    attempts = await swapping.live(1 - home, 2)
    (attempt,) = (each for each in attempts.values() if each.streams)
    assert attempt.prompt_token_ids.tolist() == [0, 1, 2, 3, 4, 5, 6], "a request that does not stream would begin anew"
    await swapping.on(1 - home, "finish", list(attempts), 2)
    completion = await to_the_end(stream, pieces)
    assert completion.token_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert len((await whole).token_ids) == 2


async def test_a_stream_whose_tokens_cannot_be_had_again_fails_with_the_reason() -> None:
    async with Fleet(RouterConfig(strategy="round_robin", resume=False)) as fleet:
        stream = fleet.stream(request("s"))
        first = sending(stream)
        await fleet.live(0, 1)
        await fleet.on(0, "progress", 4)
        await first
        await fleet.on(0, "die")
        (attempt,) = (await fleet.live(1, 1)).values()
        await fleet.on(1, "finish", [attempt.request_id], 2)
        with pytest.raises(GeneratorFailed, match="lost after 4 tokens were streamed"):
            await anext(stream)


async def test_a_stream_that_nobody_can_serve_fails_with_the_cause(swapping: Fleet) -> None:
    stream = swapping.stream(request("s"))
    first = sending(stream)
    await swapping.live(0, 1)
    await swapping.on(0, "progress", 1)
    await first
    await swapping.on(0, "die")
    await swapping.live(1, 1)
    await swapping.on(1, "die")
    with pytest.raises(RequestLost, match="2 generators died under it .it was killed"):
        await anext(stream)
    for index in range(2):
        await swapping.router.call(GeneratorRouter.generator_left_out, f"g{index}", "it was killed three times")
    with pytest.raises(GeneratorFailed, match="every generator is dead"):
        await anext(swapping.stream(request("later")))
