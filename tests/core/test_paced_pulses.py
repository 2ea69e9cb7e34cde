"""What goes with a pulse does not make the link look dead."""

import pytest

from titan_rl.hosts.attached_host import LEAST_BYTES, LOOKS, MOST_BYTES, Pace

SECONDS = 10.0


@pytest.mark.parametrize("bytes_per_second", [64 << 10, 300 << 10, 1 << 20, 100 << 20])
def test_no_pulse_is_missed_on_a_slow_link_and_a_fast_one_is_used(bytes_per_second: int) -> None:
    now = 0.0
    pace, sent, took = Pace(SECONDS, clock=lambda: now), [], []
    for _ in range(50):
        began = now
        with pace as nbytes:
            now += nbytes / bytes_per_second
        sent.append(nbytes)
        took.append(now - began)
    assert max(took) <= SECONDS / LOOKS
    assert sent[0] == LEAST_BYTES and max(sent) >= min(MOST_BYTES, bytes_per_second // 2)


def test_after_a_late_pulse_little_is_sent() -> None:
    now = 0.0
    pace = Pace(SECONDS, clock=lambda: now)
    for _ in range(10):
        with pace as nbytes:
            pass
    assert nbytes == MOST_BYTES
    with pytest.raises(TimeoutError), pace:
        now += SECONDS / LOOKS
        raise TimeoutError
    with pace as nbytes:
        assert nbytes == LEAST_BYTES
