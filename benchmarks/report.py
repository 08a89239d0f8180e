"""Measured numbers in the documentation, from the files of benchmarks/results.

    python benchmarks/report.py --check     # fails where a page differs from its results or a number has no source
    python benchmarks/report.py --write     # renders the figures of all pages again, and the scores of `canter tasks`

A file of results has one measurement per line, a JSON object that `report` has written. A page takes numbers from it
with a figure in the text, or a table:

    up to <!-- figure: cpu_training.jsonl library=canter max ratio .1f --><!-- end --> times as fast

    <!-- table: learning.jsonl policy=mlp per task
    | task | mean | each seed |
    | {task} | {mean eval .1f} | {each eval .1f} |
    -->
    <!-- end -->

A query is `[name=value ...] [function] field [format]`, or two of them divided by ` / `; `name=a,b` selects either. The
functions are `mean`, `iqm` (interquartile mean), `interval` (of the `iqm`, by bootstrap), `each` (seed by seed), `min`,
`max` and `all` (distinct values); without one, all selected lines must agree. `curve@N` is the return at N steps;
`about` is the date, machine, versions and commit. A table has one row for every combination of the fields after `per`;
a selection inside its braces replaces that of the row. Formats are Python's, and `.2M` is in millions.

All other numbers on a page in `STRICT` must be part of a name, or settings, sizes and versions in code font. On other
pages this holds for numbers with a unit of measurement, which are never settings.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OTHER_SETTINGS = {"preset", "profile", "note"}  # of runs with other settings than the task's preset
SCORES = ROOT / "src" / "canter" / "presets" / "scores.json"
STRICT = ["README.md", "docs/index.md", "docs/benchmarks.md"]
FUNCTIONS = ("mean", "iqm", "interval", "each", "min", "max", "all")
OF_SEEDS = ("mean", "iqm", "interval", "each")
# Flags that are followed by a path of one machine.
PATHS = (
    "--out",
    "--sb3-python",
    "--teacher",
    "--run",
    "--runs",
    "--folder",
    "--plot",
    "--returns",
)

FIGURE = re.compile(r"(<!-- figure: ([^>]*?) -->)(.*?)(<!-- end -->)")
TABLE = re.compile(r"(<!-- table: ([^\n]*)\n(.*?)\n-->\n)(.*?)(<!-- end -->)", re.DOTALL)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)|^\s*\d+\. |^--8<--.*?$", re.DOTALL | re.MULTILINE)
NUMBER = r"(?<![\w.])(?<![A-Za-z][-.])[-+]?\d(?:[\d.,]*\d)?"
WORD = r"\b(?:two|three|four|five|six|seven|eight|nine|ten|dozens?|twenty|thirty|fifty|hundreds?)\b"
UNIT = (
    r"(?: to [-\d.,\w]+)? ?(?:%|(?:x|times|fold|percent|ms|s|seconds?|minutes?|hours?|GiB|MB/s|m/s|steps/s|million)\b)"
)
UNBACKED = re.compile(f"{NUMBER}|{WORD}{UNIT}")
UNBACKED_UNIT = re.compile(f"(?:{NUMBER}|{WORD}){UNIT}")


# ---------------------------------------------------------------------- what scripts keep
def about():
    """Date, machine, versions, commit and command of a measurement."""
    import torch

    words = sys.argv[1:]
    kept = [w for i, w in enumerate(words) if w not in PATHS and (i == 0 or words[i - 1] not in PATHS)]
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    machine = f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "commit": git.stdout.strip() or None,
        "command": " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *kept]),
    }


def report(result, out=None):
    """Print the result without its curve, and append all of it with `about` to the file `out` if there is one."""
    print({name: value for name, value in result.items() if name != "curve"}, flush=True)
    if out:
        with out.open("a") as file:
            file.write(json.dumps({**result, "about": about()}) + "\n")


# ---------------------------------------------------------------------- queries
class NoSourceError(ValueError):
    """A figure that the results do not give."""


def read(name):
    """The lines of a file of results."""
    path = RESULTS / name
    if not path.is_file():
        names = sorted(other.name for other in RESULTS.iterdir())
        raise NoSourceError(f"there is no benchmarks/results/{name}; there are {names}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def select(words):
    """The selections `name=value` among words, and the words that are none."""
    chosen = dict(word.split("=", 1) for word in words if "=" in word)
    return {name: value.split(",") for name, value in chosen.items()}, [word for word in words if "=" not in word]


def matching(rows, chosen):
    found = [row for row in rows if all(str(row.get(name, "")) in values for name, values in chosen.items())]
    if not found:
        raise NoSourceError(f"no line has {' '.join(f'{name}={values}' for name, values in chosen.items())}")
    return found


def evaluate(query, rows, chosen):
    """The text that a query gives for the lines selected by `chosen`."""
    words = shlex.split(query)
    spec = words.pop() if words[-1][0] in ".," else ""
    parts = [list(part) for is_sign, part in groupby(words, lambda word: word == "/") if not is_sign]
    value, *divisor = [value_of(part, rows, chosen) for part in parts]
    if divisor:
        value /= divisor[0]
    return ", ".join(show(v, spec) for v in value) if isinstance(value, list) else show(value, spec)


def value_of(words, rows, chosen) -> Any:
    extra, names = select(words)
    if len(names) not in (1, 2) or (len(names) == 2 and names[0] not in FUNCTIONS):
        raise NoSourceError(
            f"{' '.join(words)!r} is not `[name=value ...] [function] field`; functions are {FUNCTIONS}"
        )
    *function, field = names
    found = matching(rows, {**chosen, **extra})
    if field == "about":
        return origin([row["about"] for row in found])
    values = [take(row, field) for row in found]
    if function == ["all"]:
        return list(dict.fromkeys(values))
    if not function:
        if len(set(values)) > 1:
            raise NoSourceError(f"{field} has several values, {sorted(set(values))[:5]}: select one or use {FUNCTIONS}")
        return values[0]
    seeds = [row["seed"] for row in found if "seed" in row]
    if function[0] in OF_SEEDS and len(seeds) > len(set(seeds)):
        raise NoSourceError(f"two of the selected lines have the same seed: {seeds}")
    if function == ["each"]:
        return values
    if function[0] in ("iqm", "interval"):
        from canter.utils.statistics import iqm_estimate  # a peer's Python, which measures too, does not have it

        estimate = iqm_estimate([np.array(values)])
        return estimate.value if function == ["iqm"] else [estimate.low, estimate.high]
    return {"mean": statistics.fmean, "min": min, "max": max}[function[0]](values)


def take(row, field):
    """The value of a field; `curve@N` is the last column of the curve's last point within N steps."""
    name, _, steps = field.partition("@")
    if name not in row:
        raise NoSourceError(f"the line {str(row)[:80]} has no {name!r}; it has {list(row)}")
    return [point[-1] for point in row[name] if point[0] <= int(steps)][-1] if steps else row[name]


def origin(sources):
    """When, where, with which versions and at which commit lines were measured."""
    texts = {"date": "{}", "machine": "on {}", "versions": "with {}", "commit": "at commit {}"}
    found = {name: sorted({source[name] for source in sources if source.get(name)}) for name in texts}
    joined = {name: (", " if name == "commit" else " and ").join(values) for name, values in found.items()}
    return " ".join(text.format(joined[name]) for name, text in texts.items() if joined[name])


def show(value, spec):
    if value is None:
        return "-"
    if spec.endswith("M"):
        return f"{value / 1e6:{spec[:-1]}f} M"
    return str(value) if isinstance(value, str) else format(value, spec).replace("%", " %")


# ---------------------------------------------------------------------- pages
def pages():
    """All pages with figures, or that must not have numbers of their own."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def render(text):
    """A page with its figures and tables from the results; one without a source stays as it is."""
    for pattern, render_one in RENDERERS:
        text = pattern.sub(lambda match, render_one=render_one: attempt(render_one, match)[0], text)
    return text


def attempt(render_one, match):
    """The text of a figure or table, and the error that kept it as it was."""
    try:
        return render_one(match), None
    except (ValueError, TypeError, LookupError) as error:
        return match[0], error


def render_figure(match):
    opening, query, _, end = match.groups()
    name, _, rest = query.partition(" ")
    return f"{opening}{evaluate(rest, read(name), {})}{end}"


def render_table(match):
    opening, query, template, _, end = match.groups()
    words, _, per = query.partition(" per ")
    name, *words = shlex.split(words)
    chosen, fields = select(words)[0], per.strip().split(",")
    rows = read(name)
    head, row = template.splitlines()
    groups = dict.fromkeys(tuple(str(found.get(field, "")) for field in fields) for found in matching(rows, chosen))
    lines = [head, re.sub(r"[^|]+", "---", head)]
    for group in groups:
        own = {**chosen, **{field: [value] for field, value in zip(fields, group, strict=True)}}
        lines.append(re.sub(r"\{(.*?)\}", lambda found, own=own: evaluate(found[1], rows, own), row))
    return "\n".join([opening, *lines, "", end])


RENDERERS = ((FIGURE, render_figure), (TABLE, render_table))


def problems(name, text):
    """What is wrong with the figures of a page, as `page:line: sentence`."""
    found = []
    for pattern, render_one in RENDERERS:
        for match in pattern.finditer(text):
            line = text[: match.start()].count("\n") + 1
            if pattern is FIGURE and not text[: match.start()].rpartition("\n")[2].strip():
                found.append((line, "a figure must not begin a line: Markdown takes the line for HTML"))
            right, error = attempt(render_one, match)
            if error:
                found.append((line, f"{match[2]!r}: {error}"))
            elif match[0] != right:
                lines = zip_longest(match[0].splitlines(), right.splitlines())
                old, new = next(pair for pair in lines if pair[0] != pair[1])
                found.append((line, f"differs from its source: {old!r} should be {new!r}"))
    bare = CODE.sub(blank_code, TABLE.sub(blank_table, FIGURE.sub(blank, text)))
    for match in (UNBACKED if name in STRICT else UNBACKED_UNIT).finditer(bare):
        line = bare[: match.start()].count("\n") + 1
        found.append((line, f"the number {match[0]!r} has no source: make it a figure, or a setting in code font"))
    return [f"{name}:{line}: {sentence}" for line, sentence in sorted(found)]


def blank(match):
    """The line ends of a match, so that what follows keeps its line number."""
    return "\n" * match[0].count("\n")


def blank_table(match):
    """What was typed into the head and row of a table."""
    return re.sub(r"\{.*?\}", "", match[3]) + blank(match)[match[3].count("\n") :]


def blank_code(match):
    """Code, unless it is a number with a unit of measurement."""
    return match[0] if UNBACKED_UNIT.fullmatch(match[0].strip("`")) else blank(match)


# ---------------------------------------------------------------------- scores of `canter tasks`
def scores():
    """Mean return, seeds and steps of each preset by algorithm and task, from the runs nearest to its length."""
    from canter.presets import presets

    found = {}
    for file, algorithms in (("learning.jsonl", ("ppo",)), ("off_policy_learning.jsonl", ("dqn", "sac", "td3"))):
        for algorithm in algorithms:
            for task, preset in presets(algorithm).items():
                network = (preset.get("policy") or {}).get("rnn_type", "mlp")
                own = [row for row in read(file) if row["task"] == task and row.get("algo", "ppo") == algorithm]
                own = [row for row in own if row.get("policy", "mlp") == network and not row.keys() & OTHER_SETTINGS]
                if own:
                    length = min((row["steps"] for row in own), key=lambda n: abs(n - preset["total_timesteps"]))
                    returns = [row["eval"] for row in own if row["steps"] == length]
                    mean = {"return": round(statistics.fmean(returns), 1), "seeds": len(returns), "steps": length}
                    found.setdefault(algorithm, {})[task] = mean
    return found


def scores_text():
    """The content of the file with the scores."""
    return json.dumps(scores(), indent=1) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true")
    what.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found, used = [], set()
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if args.write:
            text = render(text)
            path.write_text(text, encoding="utf-8")
        found += problems(path.relative_to(ROOT).as_posix(), text)
        used |= set(re.findall(r"<!-- (?:figure|table): (\S+)", text))
    if args.write:
        SCORES.write_text(scores_text())
    elif SCORES.read_text() != scores_text():
        found.append(f"{SCORES.relative_to(ROOT)}: differs from the results")
    unused = sorted({path.name for path in RESULTS.iterdir()} - used)
    found += [f"benchmarks/results/{name}: no page refers to it" for name in unused]
    print("\n".join(found) or "every figure has its source")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
