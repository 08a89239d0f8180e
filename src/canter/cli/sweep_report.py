"""The results of a sweep: the best settings as a preset, a page with its plots, and all trials as JSON."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from canter.cli.errors import UserError
from canter.cli.live_table import make_table
from canter.cli.options import parse_train
from canter.cli.search_space import Range, settings_of, starting_point, to_flags
from canter.envs.wrap import env_options
from canter.runners.run_config import find_algorithm
from canter.utils.files import atomic_write
from canter.utils.html_page import SVG_STYLE, Page
from canter.utils.plots import COLORS, STYLE
from canter.utils.run_data import short

if TYPE_CHECKING:
    import optuna
    from matplotlib.figure import Figure
    from optuna.trial import FrozenTrial

    from canter.cli.sweep import Plan

# Settings of one run that a preset leaves to the next one.
_NOT_IN_PRESETS = {
    "seed",
    "device",
    "eval_interval",
    "max_iterations",
    "trial_metric",
    "logger_backend",
    "logger_kwargs",
}


def write_results(plan: Plan, study: optuna.Study) -> None:
    """Write best.yaml, trials.json and report.html into the folder of the sweep, and print where they are."""
    from rich import print as rich_print

    from canter.cli.sweep import counting

    options, trials = plan.options, counting(study.get_trials(deepcopy=False))
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    if not complete:
        errors = [trial.user_attrs["error"] for trial in trials if "error" in trial.user_attrs] or ["all were pruned"]
        raise UserError(f"no trial of the study {options.study!r} was completed: {errors[-1]}")
    ranked = sorted(complete, key=lambda t: t.value or 0.0, reverse=options.direction == "maximize")
    settings = settings_of(ranked[0].params, plan.space)
    preset = plan.folder / "best.yaml"
    atomic_write(preset, yaml.safe_dump(best_preset(plan, settings), sort_keys=False).encode())
    rows = [trial_row(trial) for trial in trials]
    atomic_write(plan.folder / "trials.json", f"{json.dumps(rows, indent=1)}\n".encode())
    importance = importances(study)
    write_page(plan, trials, ranked, importance)
    head = ["trial", options.objective, *(name.rpartition(".")[2] for name in plan.space)]
    states = {name: sum(t.state.name == name for t in trials) for name in ("COMPLETE", "PRUNED", "FAIL")}
    done = f"{states['COMPLETE']} complete, {states['PRUNED']} pruned, {states['FAIL']} failed"
    rich_print(make_table(f"{options.task}: {len(trials)} trials, {done}", head, table_rows(plan, ranked)))
    names: dict[str, Any] = {
        "report": plan.folder / "report.html",
        "trials": plan.folder / "trials.json",
        "preset": preset,
    }
    names["next"] = f"canter train {options.task} --config {preset}"
    for name, text in names.items():
        print(f"  {name:<12}{text}")


def table_rows(plan: Plan, ranked: list[FrozenTrial]) -> list[list[str]]:
    """The cells of the ten best trials."""
    return [[str(t.number), short(t.value), *(short(t.params.get(name)) for name in plan.space)] for t in ranked[:10]]


def trial_row(trial: FrozenTrial) -> dict[str, Any]:
    """A trial in JSON types."""
    curve = sorted(trial.intermediate_values.items())
    row = {"trial": trial.number, "state": trial.state.name.lower(), "value": trial.value, "params": trial.params}
    return {**row, "curve": curve, **trial.user_attrs}


def best_preset(plan: Plan, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a trial in the layout of a preset: what differs from the task's own preset."""
    options, config = parse_train([plan.options.task, *plan.flags, *to_flags(settings)])
    _, default = parse_train([options.task, "--algo", find_algorithm(config["algorithm"]["class_name"])])
    preset: dict[str, Any] = {"task": options.task, "num_envs": options.num_envs}
    preset["total_timesteps"] = options.total_timesteps
    given = config.pop("algorithm")
    algorithm = {k: v for k, v in given.items() if k == "class_name" or v != default["algorithm"].get(k)}
    preset |= {k: v for k, v in config.items() if k not in _NOT_IN_PRESETS and v != default.get(k)}
    if environment := env_options(vars(options.environment)):  # the settings were found in this one
        preset["run"] = environment
    return preset | {"algorithm": algorithm}


def importances(study: optuna.Study) -> dict[str, float]:
    """How much of the objective's spread each setting explains (PED-ANOVA); empty for too few trials."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the evaluator is marked as experimental
            return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    except (ValueError, RuntimeError):
        return {}


def write_page(plan: Plan, trials: list[FrozenTrial], ranked: list[FrozenTrial], importance: dict[str, float]) -> None:
    """Write report.html."""
    import matplotlib

    options = plan.options
    seeds = f"{options.seeds} seeds" if options.seeds > 1 else "one seed"
    steps = f"{plan.train.total_timesteps:,} steps and {seeds} per trial"
    page = Page(f"Sweep of {options.task}", f"Study {options.study!r}: {len(trials)} trials, {steps}.")
    start = starting_point(plan.space, plan.train)
    first = "trial 0 has" if start and trials[0].params == start else "the space leaves out"
    page.section("Trials", f"The best by {options.objective}; {first} the settings that the search began with.")
    page.table(["trial", options.objective, *plan.space], table_rows(plan, ranked))
    with matplotlib.rc_context({**STYLE, **SVG_STYLE}):
        page.section("History", "Every trial, and the best until then.")
        page.drawing(draw_history(ranked, options.objective, options.direction), "objective by trial")
        page.section("Slices", "The objective against each setting; darker trials are later ones.")
        page.drawing(draw_slices(plan, ranked), "objective by setting")
        if importance:
            page.section("Importance", "Share of the spread between good trials that a setting explains (PED-ANOVA).")
            page.drawing(draw_importance(importance), "importance of each setting")
    page.write(plan.folder / "report.html")


def draw_history(ranked: list[FrozenTrial], objective: str, direction: str) -> Figure:
    """The objective of every completed trial in the order of their numbers."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    ordered = sorted(ranked, key=lambda trial: trial.number)
    numbers, values = [t.number for t in ordered], np.array([t.value for t in ordered], dtype=np.float64)
    best = np.maximum.accumulate(values) if direction == "maximize" else np.minimum.accumulate(values)
    figure = Figure(figsize=(9.5, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(numbers, values, color=COLORS[0], s=22, label="trial", zorder=3)
    axes.step(numbers, best, where="post", color=COLORS[1], label="best so far")
    axes.set_xlabel("trial")
    axes.set_ylabel(objective)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="best")
    return figure


def draw_slices(plan: Plan, ranked: list[FrozenTrial]) -> Figure:
    """The objective against each setting."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    columns = min(3, len(plan.space))
    rows = -(-len(plan.space) // columns)
    figure = Figure(figsize=(9.5 if columns > 1 else 5.0, 2.6 * rows), layout="constrained")
    values, order = np.array([t.value for t in ranked], dtype=np.float64), [t.number for t in ranked]
    first = None
    for index, (name, entry) in enumerate(plan.space.items(), 1):
        first = axes = figure.add_subplot(rows, columns, index, sharey=first)
        if isinstance(entry, Range):
            places: list[Any] = [t.params[name] for t in ranked]
            if entry.log:
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0e}"))  # the usual one writes math
                axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_xlim(entry.low, entry.high)
        else:
            places = [entry.keys().index(t.params[name]) for t in ranked]
            axes.set_xticks(range(len(entry.values)), [str(key) for key in entry.keys()])  # noqa: SIM118
            axes.set_xlim(-0.5, len(entry.values) - 0.5)
        axes.scatter(places, values, c=order, cmap="Blues", vmin=-0.5 * max(order, default=1), edgecolors="#335", s=24)
        axes.set_title(name.rpartition(".")[2])
        if index % columns == 1 or columns == 1:
            axes.set_ylabel(plan.options.objective)
    return figure


def draw_importance(importance: dict[str, float]) -> Figure:
    """A bar for each setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 0.8 + 0.35 * len(importance)), layout="constrained")
    axes = figure.add_subplot()
    names = list(importance)[::-1]
    axes.barh(names, [importance[name] for name in names], color=COLORS[0], height=0.6)
    axes.set_xlim(0, 1)
    axes.grid(axis="y", visible=False)
    return figure
