import json

import numpy as np
import pytest

from canter.utils.logging import Logger
from canter.utils.plots import _draw, _layout, _load, common_grid, plot_runs, read_metrics, smooth


def make_run(directory, values, start=10, tag="episode/mean_reward", **others):
    with Logger(None, directory) as logger:
        for i, value in enumerate(values):
            logger.log_scalars({tag: value, **others}, start + 10 * i)
    return directory


def test_metrics_are_read_by_tag_with_their_own_steps(tmp_path):
    with Logger(None, tmp_path) as logger:
        logger.log_scalars({"a": 1.0, "b": 5.0}, 10)
        logger.log_scalars({"a": 2.0}, 20)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('not json\n{"a": "text", "step": 30}\n{"a": 4.0}\n[1]\n{"a": 3.0, "step": 40}\n{"a": 9.0, "st')
    want = {"a": ([10, 20, 40], [1.0, 2.0, 3.0]), "b": ([10], [5.0])}
    assert read_metrics(tmp_path) == want
    assert read_metrics(tmp_path / "metrics.jsonl") == want


def test_run_without_metrics_is_an_error_with_its_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl does not exist"):
        read_metrics(tmp_path)


def test_a_run_that_logged_nothing_is_an_error_that_says_why(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    for metrics in (None, ["eval/mean_reward"]):
        with pytest.raises(ValueError, match=r"no metric was logged: .* shorter than its log_interval"):
            plot_runs([tmp_path], tmp_path / "curve.png", metrics)


def test_smoothing_keeps_straight_lines_and_cuts_the_window_at_the_ends():
    assert smooth(np.arange(5.0)).tolist() == [0, 1, 2, 3, 4]
    line = np.arange(100.0)  # window 3
    assert smooth(line)[1:-1] == pytest.approx(line[1:-1])
    assert smooth(line)[0] == 0.5
    spike = np.zeros(100)
    spike[50] = 3.0
    assert smooth(spike)[48:53].tolist() == [0, 1, 1, 1, 0]


def test_common_grid_is_the_range_that_all_runs_cover():
    grid = common_grid([np.array([0.0, 50.0]), np.array([10.0, 80.0])])
    assert grid is not None
    assert (grid[0], grid[-1]) == (10.0, 50.0)
    assert common_grid([np.array([0.0, 5.0]), np.array([6.0, 9.0])]) is None


@pytest.mark.parametrize("count", range(1, 20))
def test_panels_never_overlap_and_stay_inside(count):
    rows, columns, places = _layout(count)
    cells = [
        (r, c) for row, column in places for r in range(row.start, row.stop) for c in range(column.start, column.stop)
    ]
    assert len(places) == count
    assert len(set(cells)) == len(cells)
    assert all(r < rows and c < columns for r, c in cells)
    assert max(r for r, _ in cells) == rows - 1


def axes_of(run_dirs, tags, labels=None):
    return _draw(_load(run_dirs, labels), tags).axes


def test_seeds_of_one_label_become_mean_and_band(tmp_path):
    runs = [make_run(tmp_path / f"s{i}", [i * 2.0] * 5) for i in range(2)]  # 0 and 2: mean 1, std 1
    figure = _draw(_load(runs, ["ppo", "ppo"]), ["episode/mean_reward"])
    (line,) = figure.axes[0].lines
    assert set(line.get_ydata()) == {1.0}
    (band,) = figure.axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.0, 2.0)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ppo (2 seeds)"]


def test_seeds_without_common_steps_are_drawn_one_by_one(tmp_path):
    runs = [make_run(tmp_path / "a", [1.0, 2.0], start=0), make_run(tmp_path / "b", [1.0, 2.0], start=500)]
    assert len(axes_of(runs, ["episode/mean_reward"], ["x", "x"])[0].lines) == 4


@pytest.mark.parametrize("labels", [["a"], [f"a rather long label, number {i}" for i in range(6)], ["x" * 90, "y"]])
def test_the_legend_is_inside_the_picture_whatever_its_labels(tmp_path, labels):
    runs = [make_run(tmp_path / f"run{i}", [1.0, 2.0]) for i in range(len(labels))]
    figure = _draw(_load(runs, labels), ["episode/mean_reward"])
    figure.savefig(tmp_path / "curve.png")
    legend, axes = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.width
    assert legend.y1 <= figure.bbox.height
    assert axes.y1 < legend.y0
    assert axes.height > 0.5 * 2.6 * figure.dpi
    if max(map(len, labels)) < 40:  # one column fits
        assert figure.get_figwidth() == 3.5


def test_run_without_a_tag_and_nonfinite_values_leave_gaps(tmp_path):
    a = make_run(tmp_path / "a", [1.0, 2.0], **{"time/fps": 5.0})
    b = make_run(tmp_path / "b", [1.0, 2.0])
    with open(b / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"episode/mean_reward": float("nan"), "step": 90}) + "\n")
    returns, fps = axes_of([a, b], ["episode/mean_reward", "time/fps"])
    assert [len(line.get_xdata()) for line in returns.lines] == [2, 2, 2, 2]
    assert len(fps.lines) == 2


def test_learning_rate_over_decades_is_logarithmic(tmp_path):
    run = make_run(tmp_path / "a", [1e-3, 1e-4, 1e-5], tag="train/learning_rate")
    flat = make_run(tmp_path / "b", [1e-3, 9e-4], tag="train/learning_rate")
    axes = axes_of([run], ["train/learning_rate"])[0]
    assert axes.get_yscale() == "log"
    axes.figure.draw_without_rendering()
    labels = {label.get_text() for label in (*axes.get_yticklabels(), *axes.get_yticklabels(minor=True))}
    assert "1e\N{MINUS SIGN}04" in labels
    assert not any("$" in label for label in labels)
    assert axes_of([flat], ["train/learning_rate"])[0].get_yscale() == "linear"


def test_image_is_written_and_global_style_is_unchanged(tmp_path):
    import matplotlib

    others = {"episode/mean_length": 3.0, "train/value_loss": 1.0, "train/approx_kl": 0.01, "time/fps": 1e5}
    run = make_run(tmp_path / "a", [1.0, 2.0, 3.0], **others)
    before = dict(matplotlib.rcParams)
    path = plot_runs([run], tmp_path / "out" / "curves.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000
    assert dict(matplotlib.rcParams) == before
    assert [entry.name for entry in path.parent.iterdir()] == ["curves.png"]


def test_invalid_arguments_are_errors_that_list_the_choices(tmp_path):
    run = make_run(tmp_path / "a", [1.0], tag="my/metric")
    with pytest.raises(ValueError, match="no run to plot"):
        plot_runs([], tmp_path / "x.png")
    with pytest.raises(ValueError, match="1 runs need as many labels, got 2"):
        plot_runs([run], tmp_path / "x.png", labels=["a", "b"])
    with pytest.raises(ValueError, match="'other'.* my/metric"):
        plot_runs([run], tmp_path / "x.png", metrics=["my/metric", "other"])
    with pytest.raises(ValueError, match="choose from my/metric"):
        plot_runs([run], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    "labels", [["a", "b"], ["Walker2d-v5 a-long-name-of-a-run", "HalfCheetah-v5 another-long-name"]]
)
def test_the_legend_fits_into_the_picture_of_one_metric(tmp_path, labels):
    runs = [make_run(tmp_path / name, [1.0, 2.0], tag="x") for name in "ab"]
    figure = _draw(_load(runs, labels), ["x"])
    figure.savefig(tmp_path / "a.png")  # places the legend
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1
