"""A request's seed says what is asked, not when."""

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.seeding import derive_seed, prompt_digest, request_seed
from titan_rl.types import Purpose

small = st.integers(0, 50)
prompts = st.lists(small, max_size=3).map(prompt_digest)
places = st.tuples(small, st.sampled_from(list(Purpose)), small, small, prompts, small)


@given(places, places)
def test_two_places_share_a_seed_only_if_they_are_the_same_place(a: tuple, b: tuple) -> None:  # type: ignore[type-arg]
    assert (request_seed(*a) == request_seed(*b)) == (a == b)


@given(places)
def test_a_seed_fits_a_signed_64_bit_integer(place: tuple) -> None:  # type: ignore[type-arg]
    assert 0 <= request_seed(*place) < 2**63


def test_a_number_and_its_text_are_different_parts() -> None:
    assert derive_seed(1, "2") != derive_seed("1", 2)


def test_the_derivation_never_changes() -> None:
    """Recorded runs must replay: this number is part of the format."""
    assert request_seed(0, Purpose.TRAIN, 0, 0, prompt_digest([2, 3])) == EXPECTED_FIRST_SEED


EXPECTED_FIRST_SEED = 7159873987515134612
