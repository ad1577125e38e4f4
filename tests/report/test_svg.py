"""Charts show the numbers of a run at the correct coordinates."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from events import BEGAN, start, steps, whole, write_recipe, write_run
from hypothesis import given
from hypothesis import strategies as st

from roundelay.report import mixing, series
from roundelay.report.page import page
from roundelay.report.run_reader import read_run
from roundelay.report.svg import Series, axis, bar_chart, element, line_chart, log_ticks, number, round_ticks, short


def titles(svg: str) -> list[str]:
    return re.findall(r"<title>(.*?)</title>", svg)


# ------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.14032, "0.1403"), (24576, "24,576"), (7426.4, "7,426"), (-1.2294, "−1.229"), (0.0, "0"), (1.5e-5, "1.50e−5"),
     (None, "–"), (float("nan"), "–"), (2.5, "2.500")],
)  # fmt: skip
def test_numbers_are_short_and_keep_their_significant_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 8))
def test_ticks_are_round_and_inside(low: float, width: float, count: int) -> None:
    ticks = round_ticks(low, low + width, count)
    assert len(ticks) <= count + 1
    slack = 1e-6 * (abs(low) + width)
    assert all(low - slack <= t <= low + width + slack for t in ticks)


@given(st.floats(1e-9, 1e6), st.floats(1.5, 1e9))
def test_logarithmic_ticks_are_inside(low: float, ratio: float) -> None:
    ticks = log_ticks(low, low * ratio)
    assert len(ticks) <= 8
    assert all(low * 0.99 <= t <= low * ratio * 1.01 for t in ticks)


def test_an_axis_has_a_range_for_equal_values() -> None:
    for value in (0.0, 3.0, -2.0):
        flat = axis([value, value], 0, 100)
        assert 0 < flat(value) < 100
    assert [short(x) for x in (5000, 0.25, 3e-4, 2e6)] == ["5k", "0.25", "3e−4", "2M"]


# -------------------------------------------------------------------------------------------------------------- charts


def test_every_measurement_is_a_mark_at_its_coordinates() -> None:
    svg = line_chart([Series("a", 0, [(0, 1.0), (100, 0.75), (200, 0.625)], marks=True)], "t", "samples", "loss")
    ElementTree.fromstring(svg)
    assert titles(svg) == ["a: 1 at 0 samples", "a: 0.7500 at 100 samples", "a: 0.6250 at 200 samples"]
    marks = [(float(x), float(y)) for x, y in re.findall(r'<circle class="mark c0" cx="([\d.]+)" cy="([\d.]+)"', svg)]
    (x0, y0), (x1, y1), (x2, y2) = marks
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y0 == pytest.approx(2 * (y2 - y1), abs=0.3)  # a linear scale, downwards
    assert y0 < y1 < y2


def test_values_of_different_magnitude_get_a_logarithmic_axis() -> None:
    svg = line_chart([Series("a", 0, [(0, 10.0), (1, 1.0), (2, 0.1)], marks=True)], "t", "s", "loss")
    _, y0, y1, y2 = [0.0, *(float(y) for y in re.findall(r'cy="([\d.]+)"', svg))]
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)


def test_elements_escape_attributes_and_titles() -> None:
    assert element("path", title="a<b", cls="line", d="M0", stroke_width=2.0) == (
        '<path class="line" d="M0" stroke-width="2"><title>a&lt;b</title></path>'
    )
    assert element("rect", x=1.25, fill='"') == '<rect x="1.2" fill="&quot;"/>'


def test_charts_without_data_are_empty() -> None:
    assert line_chart([Series("a", 0, [])], "t", "s", "loss") == ""
    assert bar_chart([], "t", "x", "y") == ""


def test_names_are_escaped_in_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>&x", whole(1), settings='strategy = "<script>alert(1)</script>"\n')
    text = page([read_run(folder), read_run(folder)])
    assert "<script" not in text
    assert "<b>&x" not in text


# ---------------------------------------------------------------------------------------------------- from the events


def test_losses_of_learners_are_averaged_in_bins(tmp_path: Path) -> None:
    events = [steps(rank, float(s), 10 * s, loss=float(rank)) for s in range(1, 5) for rank in range(4)]
    run = read_run(write_run(tmp_path / "a", events))
    assert series.train_loss(run, "position") == [(10, 1.5), (20, 1.5), (30, 1.5), (40, 1.5)]


def test_speed_is_the_sum_of_all_learners(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", whole(3)))
    assert [y for _, y in series.throughput(run)] == pytest.approx([300.0] * 4)


def test_staleness_is_counted_over_all_learners(tmp_path: Path) -> None:
    events = [steps(0, 1.0, 0, staleness={"0": 6, "9": 2}), steps(1, 1.0, 0, staleness={"1": 1, "200": 1})]
    run = read_run(write_run(tmp_path / "a", events))
    shares = dict(series.staleness(run))
    assert (shares["0"], shares["1"], shares["8+"], shares["128+"]) == (60.0, 10.0, 20.0, 10.0)
    assert sum(shares.values()) == pytest.approx(100.0)
    assert series.mean_staleness(run) == pytest.approx((2 * 9 + 1 + 200) / 10)


def test_the_time_of_a_learner_sums_to_the_elapsed_time(tmp_path: Path) -> None:
    slow = steps(
        1, 2.0, 0, elapsed_s=2.0, seconds={"compute": 3.0, "comm": 1.0}
    )  # more than the elapsed time: the kinds overlap
    run = read_run(write_run(tmp_path / "a", [steps(0, 1.0, 0), steps(0, 2.0, 0), slow]))
    fast, other = series.strips(run, 8)
    assert fast.seconds == pytest.approx({"compute": 1.0, "comm": 0.5, "other": 0.5})
    assert other.seconds == pytest.approx({"compute": 1.5, "comm": 0.5})
    for strip in (fast, other):
        assert [sum(cell.values()) for cell in strip.bins] == pytest.approx([1.0] * 8)


# -------------------------------------------------------------------------------------------------------------- mixing


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_the_ring_has_its_learners_and_pairs(size: int) -> None:
    topology = start(size)["mixing"]
    svg = mixing.ring(topology, {})
    ElementTree.fromstring(svg)
    assert svg.count('class="node"') == size
    assert svg.count('class="edge') == len(topology["weights"])
    matrix = mixing.matrix_of(topology)
    assert all(sum(row) == pytest.approx(1.0) for row in matrix)
    if size == 5:
        assert matrix[0] == pytest.approx([0.5, 0.25, 0, 0, 0.25])
        assert "weight of rank 4 in the average of rank 0: 0.250" in mixing.heat(topology)


def test_a_global_mean_and_a_server_have_their_own_pictures() -> None:
    nodes = {"nodes": [0, 1, 2, 3], "machines": [[0, 1, 2, 3]], "topology": None}
    assert mixing.matrix_of({**nodes, "kind": "mean", "every_pair": 0.25}) == [[0.25] * 4] * 4
    assert mixing.pairs_of({**nodes, "kind": "server", "weights": []}) == [(0, 1), (0, 2), (0, 3)]
    assert mixing.heat({**nodes, "kind": "server", "weights": []}) == ""


def gaps_card(text: str) -> str:
    """Return the card on gradients without an exchange; "" if the page has none."""
    _, _, after = text.partition('data-figure="exchange-gaps"')
    return after.partition("</figure>")[0]


def test_the_page_shows_runs_of_gradients_without_an_exchange(tmp_path: Path) -> None:
    events = [
        start(2),
        steps(0, 1.0, 0, exchanges=6, exchange_gaps={"0": 6, "1": 3, "2": 1}),
        steps(0, 2.0, 0, exchanges=6, exchange_gaps={"3": 1, "0": 7, "1": 2}),  # the run of 2 gradients continues
        steps(1, 2.0, 0, exchanges=3, exchange_gaps={"0": 3, "1": 2}),
        steps(1, 3.0, 0, exchanges=0),  # without a step
    ]
    run = read_run(write_run(tmp_path / "a", events))
    assert series.gap_lengths(run) == {0: 8 + 1, 1: 4 + 2, 3: 1}
    assert series.exchanges_per_gradient(run) == pytest.approx(15 / 25)
    shown = gaps_card(page([run]))
    assert f"{number(100 * 9 / 16, 3)} % have length 0" in shown
    assert f"{number(100 / 16, 3)} % have length 3" in shown
    assert "have length 2" not in shown
    for name, value in (("exchanges per gradient", "0.600"), ("longest run of gradients without an exchange", "3")):
        assert f'<td>{name}</td><td class="n">{value}</td>' in shown


def test_only_runs_with_gossip_have_runs_of_gradients(tmp_path: Path) -> None:
    without = read_run(write_run(tmp_path / "without", [start(2), steps(0, 1.0, 0, exchanges=0)]))
    mixing_run = read_run(write_run(tmp_path / "<b>", [start(2), steps(0, 1.0, 0, exchange_gaps={"0": 4, "1": 1, "2": 1})]))
    assert gaps_card(page([without])) == ""
    rows = re.findall(r"<tr>(.*?)</tr>", gaps_card(page([without, mixing_run])).partition("<tbody>")[2])
    assert [re.findall(r">([^<]+)</td>", row) for row in rows] == [["&lt;b&gt;", "0.833", "2", "2"]]


@pytest.mark.parametrize(
    "damaged",
    [
        None, 7, [1], "0", {}, {"0": -3}, {"-1": 3, "x": 1, "1.5": 2}, {"0": None, "1": "2"}, {"0": [1], "1": {}},
        {"0": float("nan"), "1": float("inf")}, {"0": True}, {"9" * 40: 1}, {"0": 0},
    ],
)  # fmt: skip
def test_damaged_gaps_are_not_shown(damaged: object, tmp_path: Path) -> None:
    assert gaps_card(page([read_run(write_run(tmp_path / "a", [start(2), steps(0, 1.0, 0, exchange_gaps=damaged)]))])) == ""


def test_improbable_gaps_are_shown_at_once(tmp_path: Path) -> None:
    improbable = {"0": 1, "3": 1e100, "999999999": 2, "01": 5}
    events = [start(2), steps(0, 1.0, 0, exchange_gaps=improbable, exchanges=-4)]
    shown = gaps_card(page([read_run(write_run(tmp_path / "a", events))]))
    assert "999,999,999" in shown
    assert '<td>exchanges per gradient</td><td class="n">0</td>' in shown


def test_page_of_64_learners_with_a_lost_one_is_below_the_size_limit(tmp_path: Path) -> None:
    gone = {"event": "lost", "time": BEGAN + 2.5, "rank": 0, "lost": 13, "why": "killed by signal SIGKILL"}
    events = [e for e in whole(64, 40) if e["rank"] != 13 or e["time"] < BEGAN + 2.2] + [gone]
    text = page([read_run(write_run(tmp_path / "a", events))])
    assert len(text) < 1_500_000
    assert text.count('class="who"') == 64
    assert "Rank 13 was lost: killed by signal SIGKILL" in text
    assert text.count('class="node gone"') == 1


# ---------------------------------------------------------------------------------------------------------------- page


def test_a_page_has_all_figures_and_no_external_resources(tmp_path: Path) -> None:
    text = page([read_run(write_recipe(tmp_path / "r", whole(3)))])
    figures = set(re.findall(r'data-figure="([\w-]+)"', text))
    expected = {
        "summary",
        "wer",
        "train-loss",
        "validation-loss",
        "validation-accuracy",
        "rate-speed",
        "time-split",
        "staleness",
    }
    assert figures >= expected | {"consensus", "mixing", "details"}
    assert "http" not in text.replace("http-equiv", "")
    assert "<script" not in text
    assert all(s in text for s in ("0.2345", "0.8765", "5.00", "0.1234", "torch 9.9.9", "roundelay train"))


def test_several_runs_share_axes_and_list_differing_settings(tmp_path: Path) -> None:
    a = read_run(write_run(tmp_path / "a", whole(2), settings='strategy = "adpsgd"\nlr = 0.5\nrun = "x"\n'))
    b = read_run(write_run(tmp_path / "b", whole(2, 8), settings='strategy = "sync"\nlr = 0.25\nrun = "y"\n'))
    text = page([a, b])
    table = text[text.index("<table") : text.index("</table>")]
    assert all(f">{cell}<" in table for cell in ("a", "b", "adpsgd", "sync", "lr", "0.5", "0.25", "4.0", "8.0"))
    assert ">run<" in table
    assert ">x<" not in table
    loss = text[text.index('data-figure="train-loss"') : text.index('data-figure="validation-loss"')]
    assert loss.count('class="line c0"') == loss.count('class="line c1"') == 3  # its key, against samples, against seconds
