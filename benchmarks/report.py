"""Results of the benchmark scripts: lines of JSON in benchmarks/results, and the scores of `canter tasks`.

    python benchmarks/report.py     # writes the scores of the presets again

`docs/make_benchmarks.py` makes the page and the pictures from the results.
"""

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OTHER_SETTINGS = {"preset", "profile", "note"}  # of runs with other settings than the task's preset
SCORES = ROOT / "src" / "canter" / "presets" / "scores.json"
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


def read(name):
    """The lines of a file of results."""
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


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


if __name__ == "__main__":
    SCORES.write_text(scores_text())
