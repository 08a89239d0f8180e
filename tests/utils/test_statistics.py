"""Statistics of a few runs, by hand and against rliable."""

import numpy as np
import pytest

from canter.utils.statistics import improvement, iqm, iqm_curve, iqm_estimate, profile


def test_iqm_leaves_out_a_quarter_at_each_end_rounded_down():
    assert iqm(np.array([100.0, 1.0, 2.0, 3.0, -50.0])) == 2.0  # one of five at each end
    assert iqm(np.array([3.0, 1.0, 5.0])) == 3.0  # none of three
    assert iqm(np.arange(12.0)[::-1] ** 2) == pytest.approx((9 + 16 + 25 + 36 + 49 + 64) / 6)  # three of twelve


def test_iqm_is_over_the_runs_of_all_tasks_together():
    estimate = iqm_estimate([np.array([0.0, 1.0]), np.array([2.0, 30.0])])
    assert estimate.value == 1.5
    assert 0.0 <= estimate.low <= 1.5 <= estimate.high <= 30.0


def test_equal_runs_have_an_interval_of_no_width():
    assert iqm_estimate([np.full(5, 7.0)]) == (7.0, 7.0, 7.0)


def test_runs_are_resampled_within_their_task():
    # Each task has equal runs: a draw within tasks changes nothing, one across tasks would.
    assert iqm_estimate([np.zeros(4), np.ones(4)]) == (0.5, 0.5, 0.5)


def test_improvement_counts_pairs_and_half_of_the_ties():
    x, y = np.array([1.0, 2.0, 3.0]), np.array([2.0, 0.0])
    assert improvement([x], [y]).value == pytest.approx((1 + 1.5 + 2) / 6)
    assert improvement([y], [x]).value == pytest.approx(1 - 4.5 / 6)
    assert improvement([x, x], [y, x]).value == pytest.approx((4.5 / 6 + 0.5) / 2)


def test_profile_is_the_share_of_runs_strictly_above():
    estimate = profile([np.array([1.0, 2.0]), np.array([2.0, 4.0])], np.array([0.0, 2.0, 3.0, 5.0]))
    assert estimate.value.tolist() == [1.0, 0.25, 0.25, 0.0]
    assert (estimate.low <= estimate.value).all()
    assert (estimate.value <= estimate.high).all()


def test_curve_is_the_iqm_of_every_point():
    runs = np.array([[0.0, 9.0], [1.0, 5.0], [2.0, 7.0], [50.0, 5.0], [3.0, 6.0]])
    estimate = iqm_curve(runs)
    assert estimate.value.tolist() == [2.0, 6.0]
    assert ((estimate.low <= estimate.value) & (estimate.value <= estimate.high)).all()


@pytest.fixture(scope="module")
def rliable():
    return pytest.importorskip("rliable.library"), pytest.importorskip("rliable.metrics")


@pytest.fixture(scope="module")
def score_tables():
    rng = np.random.default_rng(3)
    x, y = rng.normal(1.0, 1.0, (6, 3)), rng.normal(0.6, 1.5, (5, 3))  # runs, tasks
    y[0, 0] = x[0, 0]  # a tie
    return x, y


def columns(table):
    return [table[:, task] for task in range(table.shape[1])]


def near(ours, theirs, noise):
    """The point is the same; the ends of the interval are the same up to the noise of the bootstrap."""
    value, (low, high) = theirs
    assert ours.value == pytest.approx(value, abs=1e-12)
    assert np.abs(ours.low - low).max() < noise
    assert np.abs(ours.high - high).max() < noise


def test_iqm_and_its_interval_are_those_of_rliable(rliable, score_tables):
    library, metrics = rliable
    np.random.seed(1)
    points, intervals = library.get_interval_estimates(
        {"x": score_tables[0]}, lambda scores: np.array([metrics.aggregate_iqm(scores)]), reps=4000
    )
    low, high = intervals["x"][:, 0]
    near(iqm_estimate(columns(score_tables[0])), (points["x"][0], (low, high)), 0.06 * (high - low))


def test_improvement_and_its_interval_are_those_of_rliable(rliable, score_tables):
    library, metrics = rliable
    np.random.seed(1)
    points, intervals = library.get_interval_estimates(
        {"pair": score_tables}, metrics.probability_of_improvement, reps=500
    )
    low, high = intervals["pair"][:, 0]
    near(improvement(*map(columns, score_tables)), (float(points["pair"]), (low, high)), 0.1 * (high - low))


def test_profile_and_its_band_are_those_of_rliable(rliable, score_tables):
    library, _ = rliable
    np.random.seed(1)
    taus = np.linspace(-2, 4, 13)
    points, bands = library.create_performance_profile({"y": score_tables[1]}, taus, reps=4000)
    near(profile(columns(score_tables[1]), taus), (points["y"], bands["y"]), 1.01 / 15)  # one run of 15
