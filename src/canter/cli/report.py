"""`canter report`: compare groups of runs in one HTML page, and their numbers as JSON."""

from pathlib import Path
from typing import Any

from canter.cli.errors import UserError, user_errors
from canter.cli.flags import RunPaths
from canter.cli.runs import runs_below
from canter.utils.run_data import RunData, group_runs, load_run


def report(
    runs: RunPaths = (),
    group: tuple[str, ...] = (),
    out: Path = Path("report.html"),
    metric: str = "eval/mean_reward",
    score_ranges: dict[str, Any] | None = None,
    title: str | None = None,
) -> int:
    """Compare groups of runs: curves, intervals, probabilities of improvement, efficiency, settings, films, machines.

    Args:
        runs: Run directories, or directories of them, grouped by the settings in which they differ.
        group: Groups by hand: NAME=RUN,RUN with run directories, or directories of them.
        out: Page to write; the numbers are written beside it as .json.
        metric: Score of a run: of its evaluation at the end, else its last value.
        score_ranges: Scores of each task that count as 0 and 1, as YAML: {Pendulum-v1: [-1400, -150]}.
        title: Title of the page; the tasks by default.
    """
    if not runs and not group:
        raise UserError("name the runs to compare: canter report RUN..., or --group NAME=RUN,RUN")
    if out.suffix != ".html":
        raise UserError(f"the page must be a .html file, not {out}")
    with user_errors():
        from canter.utils.report import Comparison, interval_text, run_count, write_report

        found = [load_run(path) for path in runs_below(runs)]
        groups: dict[str, list[RunData]] = group_runs(found) if found else {}
        for text in group:
            name, equals, paths = text.partition("=")
            if not equals or name in groups:
                raise UserError(f"--group takes NAME=RUN,RUN with a new name each, got {text!r}")
            groups[name] = [load_run(path) for path in runs_below(map(Path, paths.split(",")))]
        comparison = Comparison(groups, metric, score_ranges)
    write_report(comparison, out, title)
    for label, estimate in comparison.iqm.items():
        interval = f"95% interval {interval_text(estimate, groups[label])}" if len(groups[label]) > 1 else "no interval"
        print(f"  {label}: {run_count(groups[label])}, IQM {estimate.value:.4g}, {interval}")
    if unfinished := comparison.unfinished():
        print(f"  {'unfinished':<12}{', '.join(unfinished)}; their last scores count")
    print(f"  {'page':<12}{out}\n  {'numbers':<12}{out.with_suffix('.json')}")
    return 0
