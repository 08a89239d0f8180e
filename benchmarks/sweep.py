"""A sweep by several processes on one storage, of which one is killed, and its best settings on fresh seeds.

    python benchmarks/sweep.py Pendulum-v1 --trials 20 --space learning_rate=log:3e-4..1e-2 gamma=0.9,0.95,0.98
    python benchmarks/sweep.py HalfCheetah-v5 --trials 8 --steps 50000 --space learning_rate=log:1e-4..3e-3

`--processes` processes of `canter sweep` share one database. When `--kill-after` trials are finished, the first
process gets SIGKILL while it runs a trial. The others try that trial again and end the study. Then `canter seeds`
trains the settings that the search began with, and the best ones, with seeds that the search has not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from report import report

CANTER = [sys.executable, "-m", "canter.cli"]


def finished(database):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if not database.exists():
        return []
    storage = f"sqlite:///{database}"
    (study,) = optuna.get_all_study_names(storage)
    trials = optuna.load_study(study_name=study, storage=storage).get_trials()
    return [trial for trial in trials if trial.state.is_finished()]


def search(args, folder):
    """Run the study; returns its trials and how long it took."""
    flags = ["--total-timesteps", str(args.steps), "--runs-dir", str(folder), "--final-episodes", "20"]
    command = [*CANTER, "sweep", args.task, "--space", *args.space, "--trials", str(args.trials), "--jobs", "1"]
    command += ["--seeds", str(args.trial_seeds), "--stale-after", "30", *flags]
    started = time.time()
    workers = []
    for i in range(args.processes):
        with (folder / f"process{i}.log").open("wb") as log:
            workers.append(subprocess.Popen(command, stdout=log, stderr=log))
    database = folder / args.task / "sweep" / "study.db"
    setting = args.space[0].partition("=")[0]
    is_busy = False  # whether the newest line of the first process is about the start of a trial
    while len(finished(database)) < args.kill_after or not is_busy:
        time.sleep(1)
        is_busy = f": {setting} " in (folder / "process0.log").read_text().rpartition("trial ")[2]
    workers[0].kill()
    codes = [worker.wait() for worker in workers]
    assert codes == [-signal.SIGKILL] + [0] * (args.processes - 1), codes
    return json.loads((database.parent / "trials.json").read_text()), time.time() - started


def fresh_seeds(args, folder, name, *flags):
    command = [*CANTER, "seeds", args.task, "--seeds", str(args.fresh), "--seed", "101", "--jobs", str(os.cpu_count())]
    command += ["--total-timesteps", str(args.steps), "--runs-dir", str(folder), "--name", name, "--no-video", *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / args.task / f"{name}-summary.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--space", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--trial-seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kill-after", type=int, default=5)
    parser.add_argument("--fresh", type=int, default=5)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    trials, seconds = search(args, args.folder)
    states = [trial["state"] for trial in trials]
    best = max(
        (trial for trial in trials if trial["value"] is not None and trial["state"] == "complete"),
        key=lambda t: t["value"],
    )
    retried = [trial for trial in trials if "retry_of" in trial]
    assert retried, "the killed process had no trial"
    found = {
        "task": args.task,
        "steps": args.steps,
        "processes": args.processes,
        "trials": len(trials),
        "seconds": seconds,
    }
    found |= {state: states.count(state) for state in ("complete", "pruned", "fail")}
    found |= {"retried": len(retried), "retried_state": retried[0]["state"], "best": best["params"]}
    preset = args.folder / args.task / "sweep" / "best.yaml"
    for name, flags in {"start": [], "found": ["--config", str(preset)]}.items():
        result = fresh_seeds(args, args.folder, name, *flags)
        low_high = {"iqm": result["iqm"][0], "low": result["iqm"][1], "high": result["iqm"][2]}
        for seed, score in result["returns"].items():
            report({**found, "settings": name, "seed": int(seed), "return": score, **low_high}, args.out)


if __name__ == "__main__":
    main()
