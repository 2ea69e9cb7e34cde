"""The report in headless Chromium: every control is used, nothing is requested, no error reaches the console (20 s)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chromium import Page, opened
from synthetic import HOSTILE, make_run

from titan_rl.view.report import write_report

PHONE, DESK = (390, 844), (1280, 900)

Reports = tuple[Path, Path]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Of one run, and of two."""
    runs = tmp_path_factory.mktemp("runs")
    first = make_run(runs / "first")
    second = make_run(runs / "second", lr=0.002, learns=False, seed=1, answer=HOSTILE)
    return write_report([first], runs / "one.html"), write_report([first, second], runs / "two.html")


@pytest.fixture(scope="module")
def browser(reports: Reports, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with opened(tmp_path_factory.mktemp("profile")) as page:
        yield page


def fill(page: Page, control: str, value: str) -> None:
    """Change an input or a choice of the list of rollouts, named by its label."""
    page.run(
        f"for (const each of document.querySelectorAll('#filters [aria-label={json.dumps(control)}]')) "
        f"{{ each.value = {json.dumps(value)}; each.dispatchEvent(new Event('input')); "
        "each.dispatchEvent(new Event('change')); }"
    )


def check(page: Page) -> None:
    assert page.errors == [] and page.requests == []
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "nothing hangs out at the side"


@pytest.mark.parametrize(
    ("which", "size"),
    [
        pytest.param(0, DESK, marks=pytest.mark.acceptance),
        pytest.param(1, DESK),
        pytest.param(0, PHONE, marks=pytest.mark.acceptance),  # in CI: that of a real run, test_gateway_in_run
        pytest.param(1, PHONE, marks=pytest.mark.acceptance),
    ],
    ids=["desk, one run", "desk, two runs", "phone, one run", "phone, two runs"],
)
def test_every_control_works_and_nothing_is_requested(
    browser: Page, reports: Reports, which: int, size: tuple[int, int]
) -> None:
    browser.open(reports[which], *size)
    assert browser.use_every_control() > 90
    check(browser)
    browser.wait("document.querySelectorAll('.row').length > 5 && document.querySelectorAll('.token').length > 5")


def test_a_run_that_is_hidden_leaves_curves_histograms_and_rollouts(browser: Page, reports: Reports) -> None:
    browser.open(reports[1], *DESK)
    browser.run("document.getElementById('curves').scrollIntoView()")
    browser.wait("document.querySelector('[data-metric] .u-wrap')")
    assert browser.run("document.querySelectorAll('.card[data-metric] .now')[0].children.length") == 2
    browser.run("document.querySelectorAll('#runs input')[1].click()")
    browser.wait("document.querySelectorAll('.card[data-metric] .now')[0].children.length === 1")
    assert browser.run("document.getElementById('matches').textContent") == "328 shown"
    check(browser)


def test_lengths_of_sampled_and_trained_rollouts_stand_side_by_side(browser: Page, reports: Reports) -> None:
    browser.open(reports[0], *DESK)
    browser.wait("document.querySelector('table.lengths')")
    rows = browser.run(
        "[...document.querySelectorAll('.lengths tr')].map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    assert rows[1:] == [["sampled", "12", "12", "12"], ["trained", "9.5", "9.5", "9.5"]]


def test_rollouts_are_found_and_their_branches_walked(browser: Page, reports: Reports) -> None:
    browser.open(reports[0], *DESK)
    fill(browser, "Step", "7")
    assert browser.run("document.getElementById('matches').textContent") == "8 shown"
    browser.run("document.querySelectorAll('.row')[3].click()")
    browser.wait("document.querySelectorAll('.branch').length === 2")
    whole = browser.run("document.querySelector('.tokens').textContent")
    browser.run("document.querySelector('.walk button:last-child').click()")
    other = browser.run("document.querySelector('.tokens').textContent")
    assert other.endswith("<result>?</result>0<end>") and whole.split("</tool>")[0] == other.split("</tool>")[0]
    for name in ("gap", "logprob", "advantage", "weight", "version", "mask"):
        browser.run(f"document.querySelector('.token-view [data-value={name}]').click()")
        assert browser.run("[...document.querySelectorAll('.token')].some((each) => each.style.backgroundColor)"), name
    browser.run("document.querySelector('.token.trained').click()")
    told = browser.run("document.querySelector('.inspector').textContent")
    assert "trained" in told and "generator" in told and "version" in told
    check(browser)


def test_what_a_policy_wrote_is_text(browser: Page, reports: Reports) -> None:
    browser.open(reports[1], *DESK)
    fill(browser, "Run", "1")
    browser.wait("document.querySelector('.message:last-child pre')?.textContent.includes('onerror=alert')")
    assert browser.run("document.images.length") == 0
    check(browser)


def test_tokens_stand_in_their_order_and_each_can_be_pointed_at(browser: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, rollouts=1, answer="\u202e\u05d0\u05d1\u0661\0\u200b\r1\ufeff")
    browser.open(write_report([run], tmp_path / "report.html"), *DESK)
    browser.wait("document.querySelectorAll('.token').length > 20")
    boxes = browser.run(
        "[...document.querySelectorAll('.token')].map((each) => each.getBoundingClientRect())"
        ".map(({ left, bottom, width }) => [Math.round(bottom / 20), left, width])"
    )
    assert [box[:2] for box in boxes] == sorted(box[:2] for box in boxes)
    assert all(width > 4 for _, _, width in boxes)
    check(browser)


def test_findings_lead_to_what_they_speak_of(browser: Page, reports: Reports) -> None:
    browser.open(reports[1], *DESK)
    count = browser.run("document.querySelectorAll('.see').length")
    assert count >= 4
    for number in range(count):
        browser.run(f"document.querySelectorAll('.see')[{number}].click()")
    browser.wait("document.querySelector('.flash')")
    check(browser)


def test_a_link_leads_to_its_section_though_charts_are_drawn_on_the_way(browser: Page, reports: Reports) -> None:
    browser.open(reports[0], *PHONE)
    browser.run("document.querySelector('.links a[href=\"#rollouts\"]').click()")
    browser.wait("Math.abs(document.getElementById('rollouts').getBoundingClientRect().top - 64) < 4")
    check(browser)


def test_the_settings_of_two_runs_stand_side_by_side_on_a_phone(browser: Page, reports: Reports) -> None:
    browser.open(reports[1], *PHONE)
    for which in ("different", "all"):
        browser.run(f"document.querySelector('#which-settings [data-value={which}]').click()")
        table = "document.querySelector('#settings .scroll')"
        assert browser.run(f"{table}.scrollWidth <= {table}.clientWidth"), which
    check(browser)


def test_dark_and_light_are_chosen_by_the_system_and_by_hand(browser: Page, reports: Reports) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.open(reports[0], *PHONE, dark=True)
    dark = browser.run(ground)
    browser.run("document.getElementById('theme').click()")
    assert browser.run(ground) != dark
    browser.run("document.getElementById('theme').click()")
    assert browser.run(ground) == dark
    check(browser)
