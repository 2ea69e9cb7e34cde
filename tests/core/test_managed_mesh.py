"""The record of one mesh, as a state machine (1 s)."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scripted_meshes import served

from titan_rl.config_registry import copy4
from titan_rl.errors import MeshFailed, MeshLeaves
from titan_rl.hosts.facts import HostFacts
from titan_rl.supervision.managed_mesh import SETTLED_SECONDS, TRANSITIONS, ManagedMesh, MeshState, pause_after
from titan_rl.supervision.mesh_kinds import KINDS
from titan_rl.supervision.placement import Kind, MeshPlan, plan

ROUTER = MeshPlan(kind=Kind.ROUTER, name="router", hosts=("host0",), env=({},), devices=(None,), positions=("-",))
MOST = 2


class Client:
    actor = "first"


def is_in(*states: MeshState):
    return precondition(lambda self: self.mesh.state in states)


class MeshMachine(RuleBasedStateMachine):
    """Everything that may happen to a mesh, and how often it failed in a row by a second count."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh, self.now, self.failures, self.losses = ManagedMesh(ROUTER, client=Client()), 0.0, 0, 0

    @precondition(lambda self: self.mesh.state in (MeshState.PLACED, MeshState.LOST) and self.failures <= MOST)
    @rule()
    def begins(self) -> None:
        self.mesh.begin()

    @is_in(MeshState.STARTING)
    @rule()
    def is_born(self) -> None:
        self.mesh.bear()

    @is_in(MeshState.BORN)
    @rule()
    def is_up(self) -> None:
        self.mesh.ready([1], self.now)

    @rule(
        seconds=st.sampled_from([0.0, 1.0, SETTLED_SECONDS]),
        still=st.sampled_from([0.0, 1.0]),
        has_worked=st.sampled_from([None, False, True]),
        leaves=st.booleans(),
    )
    def is_lost(self, seconds: float, still: float, has_worked: bool | None, leaves: bool) -> None:
        """At any time: a late fault of a start before changes nothing."""
        was_up, starting = self.mesh.is_up, self.mesh.is_starting
        self.now += seconds
        moved = self.now - still - self.mesh.up_since
        settled = was_up and (moved >= SETTLED_SECONDS if has_worked is None else has_worked)
        fault = (MeshLeaves if leaves else MeshFailed)("it was killed", "router", still=still)
        assert self.mesh.lose(fault, self.now, has_worked=has_worked) == (was_up or starting)
        if was_up or starting:
            assert self.mesh.state is MeshState.LOST and self.mesh.fault is fault
            assert not self.mesh.lose(MeshFailed("its second rank", "router"), self.now)
            self.losses += 1
            if not leaves:
                self.failures = 1 if settled else self.failures + 1

    @is_in(MeshState.LOST)
    @rule()
    def is_given_up_if_it_failed_too_often(self) -> None:
        if self.mesh.failures > MOST:
            self.mesh.give_up()

    @is_in(MeshState.PLACED, MeshState.GIVEN_UP)
    @rule()
    def is_tried_afresh(self) -> None:
        self.mesh.revive()
        self.failures = 0
        assert self.mesh.state is MeshState.PLACED and not self.mesh.ends_start

    @invariant()
    def the_counts_agree(self) -> None:
        assert (self.mesh.failures, self.mesh.losses) == (self.failures, self.losses)
        assert not (self.mesh.is_up and self.mesh.ends_start)

    @rule(to=st.sampled_from(MeshState))
    def takes_no_way_that_is_not_in_the_table(self, to: MeshState) -> None:
        if to not in TRANSITIONS[self.mesh.state]:
            with pytest.raises(ValueError, match="cannot become"):
                self.mesh._move(to)


TestMeshMachine = MeshMachine.TestCase


def test_a_mesh_that_fails_again_and_again_is_started_with_longer_pauses_and_may_fail_for_days() -> None:
    assert [pause_after(failures) for failures in (1, 2, 3, 4, 5, 8, 9, 10_000)] == [0, 1, 2, 4, 8, 60, 60, 60]


def test_only_the_handle_of_processes_that_were_born_is_given_away() -> None:
    mesh = ManagedMesh(ROUTER, client=Client())
    mesh.begin()
    assert mesh.handle is None
    mesh.bear()
    mesh.lose(MeshFailed("it was killed", "router"), 0.0)
    mesh.begin()
    mesh.client.actor = "second"
    assert (mesh.handle, mesh.births) == ("first", 1)
    mesh.bear()
    assert (mesh.handle, mesh.births) == ("second", 2)


def test_every_mesh_that_is_placed_is_of_a_kind_that_says_what_its_loss_costs() -> None:
    hosts = HostFacts(cpus=2), HostFacts(cpus=2, name="host1")
    meshes = plan(copy4(), *hosts).meshes | plan(served(), *hosts).meshes
    assert {mesh.kind for mesh in meshes.values()} == {*KINDS} == {*Kind} and all(
        kind.lost_with for kind in KINDS.values()
    )
