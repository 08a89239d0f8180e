"""Write docs/benchmarks.md from benchmarks/page.md and benchmarks/results, and draw its pictures.

`{{file query}}` in the page stands for a figure, and a fenced block for a table:

    up to {{cpu_training.jsonl library=canter max ratio .1f}} times as fast

    ```table learning.jsonl policy=mlp per task
    | task | mean | each seed |
    | {task} | {mean eval .1f} | {each eval .1f} |
    ```

A query is `[name=value ...] [function] field [format]`, or two of them divided by ` / `; `name=a,b` selects either. The
functions are `mean`, `iqm` (interquartile mean), `interval` (of the `iqm`, by bootstrap), `each` (seed by seed), `min`,
`max` and `all` (distinct values); without one, all selected lines must agree. `curve@N` is the return at N steps;
`about` is the date, machine, versions and commit. A table has one row for every combination of the fields after `per`;
a selection inside its braces replaces that of the row. Formats are Python's, and `.2M` is in millions.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from canter.utils.statistics import iqm_estimate

ROOT = Path(__file__).parent.parent
RESULTS, ASSETS = ROOT / "benchmarks" / "results", ROOT / "docs" / "assets"
TEMPLATE, PAGE = ROOT / "benchmarks" / "page.md", ROOT / "docs" / "benchmarks.md"
FIGURE = re.compile(r"\{\{(\S+) (.*?)\}\}")
TABLE = re.compile(r"^```table (\S+)(.*?) per (\S+)\n(.*)\n(.*)\n```$", re.MULTILINE)
OF_SEEDS = ("mean", "iqm", "interval", "each")
Rows = list[dict[str, Any]]
Chosen = dict[str, list[str]]
BLUE, GREY, ORANGE = "#0072b2", "#999999", "#d55e00"
ASKED = {
    "CartPole-v1": 475,
    "Acrobot-v1": -90,
    "Pendulum-v1": -200,
    "LunarLanderContinuous-v3": 200,
    "HalfCheetah-v5": 5800,
    "Hopper-v5": 3000,
    "Walker2d-v5": 4400,
    "Ant-v5": 3300,
    "Humanoid-v5": 800,
}


def render(text: str) -> str:
    """A text with the figures and tables that its queries stand for."""
    text = TABLE.sub(render_table, text)
    return FIGURE.sub(lambda match: evaluate(match[2], rows_of(match[1]), {}), text)


def render_table(match: re.Match[str]) -> str:
    """A table with a row for each group of lines."""
    name, words, per, head, row = match.groups()
    chosen, fields, rows = select(shlex.split(words))[0], per.split(","), rows_of(name)
    groups = dict.fromkeys(tuple(str(found.get(field, "")) for field in fields) for found in matching(rows, chosen))
    lines = [head, re.sub(r"[^|]+", "---", head)]
    for group in groups:
        own = {**chosen, **{field: [value] for field, value in zip(fields, group, strict=True)}}
        lines.append(re.sub(r"\{(.*?)\}", lambda found, own=own: evaluate(found[1], rows, own), row))
    return "\n".join(lines)


def rows_of(name: str) -> Rows:
    """The lines of a file of results."""
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def select(words: Sequence[str]) -> tuple[Chosen, list[str]]:
    """The selections `name=value` among words, and the words that are none."""
    chosen = dict(word.split("=", 1) for word in words if "=" in word)
    return {name: value.split(",") for name, value in chosen.items()}, [word for word in words if "=" not in word]


def matching(rows: Rows, chosen: Chosen) -> Rows:
    """The lines with the selected values."""
    found = [row for row in rows if all(str(row.get(name, "")) in values for name, values in chosen.items())]
    if not found:
        raise LookupError(f"no line has {' '.join(f'{name}={values}' for name, values in chosen.items())}")
    return found


def evaluate(query: str, rows: Rows, chosen: Chosen) -> str:
    """The text that a query gives for the lines selected by `chosen`."""
    words = shlex.split(query)
    spec = words.pop() if words[-1][0] in ".," else ""
    parts = [list(part) for is_sign, part in groupby(words, lambda word: word == "/") if not is_sign]
    value, *divisor = [value_of(part, rows, chosen) for part in parts]
    if divisor:
        value /= divisor[0]
    return ", ".join(show(v, spec) for v in value) if isinstance(value, list) else show(value, spec)


def value_of(words: Sequence[str], rows: Rows, chosen: Chosen) -> Any:
    """The value of one query without its format."""
    extra, (*function, field) = select(words)
    found = matching(rows, {**chosen, **extra})
    if field == "about":
        return origin([row["about"] for row in found])
    values = [take(row, field) for row in found]
    if not function:
        if len(set(values)) > 1:
            raise LookupError(f"{field} has several values, {sorted(set(values))[:5]}: select one or use a function")
        return values[0]
    seeds = [row["seed"] for row in found if "seed" in row]
    if function[0] in OF_SEEDS and len(seeds) > len(set(seeds)):
        raise LookupError(f"two of the selected lines have the same seed: {seeds}")
    return FUNCTIONS[function[0]](values)


def interval(values: list[float]) -> list[float]:
    """The confidence interval of the interquartile mean."""
    estimate = iqm_estimate([np.array(values)])
    return [estimate.low, estimate.high]


FUNCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "iqm": lambda values: iqm_estimate([np.array(values)]).value,
    "interval": interval,
    "each": list,
    "all": lambda values: list(dict.fromkeys(values)),
}


def take(row: Mapping[str, Any], field: str) -> Any:
    """The value of a field; `curve@N` is the last column of the curve's last point within N steps."""
    name, _, steps = field.partition("@")
    return [point[-1] for point in row[name] if point[0] <= int(steps)][-1] if steps else row[name]


def origin(sources: Sequence[Mapping[str, Any]]) -> str:
    """When, where, with which versions and at which commit lines were measured."""
    texts = {"date": "{}", "machine": "on {}", "versions": "with {}", "commit": "at commit {}"}
    found = {name: sorted({source[name] for source in sources if source.get(name)}) for name in texts}
    joined = {name: (", " if name == "commit" else " and ").join(values) for name, values in found.items()}
    return " ".join(text.format(joined[name]) for name, text in texts.items() if joined[name])


def show(value: Any, spec: str) -> str:
    """A value in a format of Python's, or in millions."""
    if value is None:
        return "-"
    if spec.endswith("M"):
        return f"{value / 1e6:{spec[:-1]}f} M"
    return str(value) if isinstance(value, str) else format(value, spec).replace("%", " %")


def learning() -> None:
    """Return against environment steps, every seed, with the evaluation at the end."""
    runs = defaultdict(list)
    for run in rows_of("learning.jsonl"):
        runs[run["task"]].append(run)
    figure, axes = plt.subplots(2, 5, figsize=(17, 6.2), constrained_layout=True)
    for axis, (task, asked) in zip(axes.flat, ASKED.items(), strict=False):
        for run in runs[task]:
            steps, *_, returns = np.array(run["curve"]).T
            axis.plot(steps / 1e3, returns, color=BLUE, alpha=0.7, linewidth=1.6)
            axis.plot(steps[-1] / 1e3, run["eval"], "o", color=ORANGE, markersize=6)
        axis.axhline(asked, color=GREY, linestyle="--", linewidth=1)
        axis.set_title(task, fontsize=11)
        axis.set_xlabel("thousand steps")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    key = axes.flat[-1]
    key.axis("off")
    key.plot([], [], color=BLUE, label="return, one line a seed")
    key.plot([], [], "o", color=ORANGE, label="20 episodes without noise, at the end")
    key.plot([], [], color=GREY, linestyle="--", label="target")
    key.legend(loc="center", frameon=False, fontsize=11)
    figure.savefig(ASSETS / "learning.png", dpi=110)


def iteration() -> None:
    """Milliseconds of one PPO iteration, canter against rsl_rl."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.4), constrained_layout=True)
    runs = [run for run in rows_of("ppo_iteration.jsonl") if "iteration" in run]
    for axis, (envs, network) in zip(axes, ((4096, "MLP"), (4096, "LSTM"), (32768, "MLP")), strict=True):
        shown = [run for run in runs if (run["envs"], run["network"]) == (envs, network)]
        title = f"{envs} envs, {network}"
        peers = {run["library"]: run for run in shown if run["library"] != "canter"}
        ours = {f"canter {run['execution']} {run['precision']}": run for run in shown if run["library"] == "canter"}
        rows = peers | ours
        names = list(rows)[::-1]
        collect = [rows[n]["collect"] for n in names]
        learn = [rows[n]["learn"] for n in names]
        axis.barh(names, collect, color=ORANGE, label="collect")
        axis.barh(names, learn, left=collect, color=BLUE, label="learn")
        for i, n in enumerate(names):
            text = f"  {rows[n]['iteration']:.0f} ms  ({rows[n]['ratio']:.1f}x)"
            axis.text(rows[n]["iteration"], i, text, va="center", fontsize=9)
        axis.set_xlim(0, rows["rsl_rl"]["iteration"] * 1.35)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("ms per iteration")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9, loc="lower right")
    figure.savefig(ASSETS / "iteration.png", dpi=110)


def curves(
    name: str,
    panels: list[str],
    label: str,
    arm: str = "arm",
    ends: bool = False,
    chosen: Callable[[dict[str, Any]], bool] = lambda run: True,
) -> None:
    """One panel for each task: the curve of every arm and seed, from [steps, seconds, value] rows; dots at the ends."""
    runs = rows_of(f"{name}.jsonl")
    figure, axes = row_of(len(panels))
    for axis, panel in zip(axes, panels, strict=True):
        shown = [run for run in runs if run["task"] == panel and chosen(run)]
        colours = dict(zip(dict.fromkeys(run[arm] for run in shown), plt.cm.tab10.colors, strict=False))
        named = set()
        for run in shown:
            title = None if run[arm] in named else run[arm]
            named.add(run[arm])
            if run[arm] in ("teacher", "expert"):
                axis.axhline(run.get("eval", run.get("speed")), color=GREY, linestyle="--", linewidth=1, label=title)
                continue
            steps, _, values = np.array(run["curve"]).T
            axis.plot(steps / 1e3, values, color=colours[run[arm]], label=title, linewidth=1.6)
            if ends:
                axis.plot(steps[-1] / 1e3, run["eval"], "o", color=colours[run[arm]], markersize=6)
        finish(axis, panel, "thousand steps", label)
    figure.savefig(ASSETS / f"{name}.png", dpi=110)


def two_stage() -> None:
    """Pretrained and not, at the same number of environment steps, every seed."""
    runs = rows_of("two_stage.jsonl")
    panels = list(dict.fromkeys(run["task"] for run in runs))
    figure, axes = row_of(len(panels))
    for axis, panel in zip(axes, panels, strict=True):
        titles = {"teacher": "teachers", "scratch": "PPO from scratch", "two stages": "after demonstrations"}
        for run in (run for run in runs if run["task"] == panel):
            title = titles.pop(run["arm"], None)
            if run["arm"] == "teacher":
                axis.axhline(run["eval"], color=ORANGE, linestyle="--", linewidth=1, label=title)
                continue
            steps, _, values = np.array(run["curve"]).T
            axis.plot(steps / 1e3, values, color=GREY if run["arm"] == "scratch" else BLUE, label=title, linewidth=1.6)
        finish(axis, panel, "thousand steps", "return without noise")
    figure.savefig(ASSETS / "two_stage.png", dpi=110)


def scaling() -> None:
    """Time and memory of an iteration against the number of environments and the width of the networks."""
    found = rows_of("scaling.jsonl")
    figure, axes = row_of(4, width=4.0)
    panels = [(size, what) for size in ("envs", "width") for what in ("iteration", "memory")]
    for axis, (size, what) in zip(axes, panels, strict=True):
        sizes, values = zip(*[(row["size"], row[what]) for row in found if row["axis"] == size], strict=True)
        slope = next(f"slope {row[what]:.2f} over the larger half" for row in found if row["axis"] == f"{size} fit")
        axis.loglog(sizes, values, "o-", color=BLUE, label=slope)
        names = {"envs": "environments", "width": "width of the first layer"}
        axis.set_xticks(sizes, [f"{n // 1024}k" if n >= 4096 else str(n) for n in sizes])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        ends = [10.0**k for k in (-1, 0, 1, 2, 3)]
        axis.set_yticks([n * end for end in ends for n in (1, 2, 5) if min(values) / 2 < n * end < max(values) * 2])
        finish(axis, "", names[size], {"iteration": "ms per iteration", "memory": "GiB"}[what])
    figure.savefig(ASSETS / "scaling.png", dpi=110)


def massive() -> None:
    """Returns of SAC and PPO on thousands of environments against the seconds they took."""
    found = rows_of("off_policy_massive.jsonl")
    tasks = list(dict.fromkeys(run["task"] for run in found))
    figure, axes = row_of(len(tasks))
    for axis, task in zip(axes, tasks, strict=True):
        for run, colour in zip([run for run in found if run["task"] == task], (BLUE, ORANGE), strict=True):
            _, seconds, returns = np.array(run["curve"]).T
            axis.plot(seconds, returns, "o-", color=colour, label=run["algo"].upper(), linewidth=1.6, markersize=3)
        finish(axis, task, "seconds of training, compilation included", "return without noise")
    figure.savefig(ASSETS / "massive.png", dpi=110)


def strong() -> None:
    """Returns of SAC with and without the profile strong against environment steps, every seed."""
    runs = rows_of("sac_strong.jsonl")
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    figure, axes = row_of(len(tasks), width=3.6)
    colours = {"one gradient step": BLUE, "two gradient steps": ORANGE, "classic": GREY}
    for axis, task in zip(axes, tasks, strict=True):
        seen = set()
        for run in (run for run in runs if run["task"] == task):
            title = run.get("note", "classic")
            steps, _, returns = np.array(run["curve"]).T
            label = None if title in seen else title
            seen.add(title)
            axis.plot(steps / 1e3, returns, "o-", color=colours[title], label=label, linewidth=1.6, markersize=3)
        finish(axis, task, "thousand steps", "return without noise" if axis is axes[0] else "")
    figure.savefig(ASSETS / "sac_strong.png", dpi=110)


def row_of(count: int, width: float = 6.2) -> tuple[Any, Any]:
    """A figure of panels side by side."""
    figure, axes = plt.subplots(1, count, figsize=(width * count, 3.8), constrained_layout=True, squeeze=False)
    return figure, axes[0]


def finish(axis: Any, title: str, x: str, y: str) -> None:
    """Names, a light grid and a key."""
    axis.set_title(title, fontsize=11)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    PAGE.write_text(render(TEMPLATE.read_text(encoding="utf-8")), encoding="utf-8")
    learning()
    iteration()
    scaling()
    massive()
    strong()
    two_stage()
    trained = "training return; dots: without noise"
    longest = {run["task"]: run["steps"] for run in sorted(rows_of("estimation.jsonl"), key=lambda run: run["steps"])}
    curves("estimation", list(longest), trained, ends=True, chosen=lambda run: run["steps"] == longest[run["task"]])
    curves("distill", ["HalfCheetah-v5", "Hopper-v5"], "return of 10 episodes without noise")
    curves("visual", ["image-reach", "cartpole"], trained, arm="policy", ends=True)
    curves("amp", ["HalfCheetah-v5"], "forward speed, m/s", chosen=lambda run: run.get("grad_pen", 1.0) == 1.0)
    sac = ["Pendulum-v1", "LunarLanderContinuous-v3", "HalfCheetah-v5"]
    curves("off_policy_learning", sac, "return of 10 episodes without noise", arm="algo")
