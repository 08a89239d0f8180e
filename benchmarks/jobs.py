"""Run a list of trainings with `learning.py`, several at a time; a list that was broken off goes on where it ended.

    python benchmarks/jobs.py                                                # the lists in jobs.yaml and their jobs
    python benchmarks/jobs.py dqn --at-once 2 --out benchmarks/results/off_policy_learning.jsonl
    python benchmarks/jobs.py sac sac-strong --at-once 6 --device cuda --minutes 25 --out sac.jsonl

Every job is one run of one seed in a process of its own. Its line is in `--out` as soon as it ends, and a job whose
line is there is skipped, so the same command continues a list. After `--minutes` no job starts, and those that run
stop, are evaluated, and leave their curve so far in a file beside `--out` named *.cut.jsonl; they start anew next time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import yaml

FOLDER = Path(__file__).resolve().parent
ENTRY = {"tasks", "algo", "preset", "profile", "seeds", "steps", "set", "note", "device", "episodes", "execution"}
IDENTITY = ("task", "algo", "preset", "profile", "note", "seed")
ROUNDED_UP = 1.1  # whole iterations make a run longer than its steps, by less than this


def read_jobs(path, names):
    """The jobs of the named lists, one dict for each task and seed."""
    lists = yaml.safe_load(path.read_text())
    if unknown := [name for name in names if name not in lists]:
        raise SystemExit(f"{path.name} has no list {unknown[0]!r}; there are {', '.join(lists)}")
    jobs = []
    for entry in (entry for name in names for entry in lists[name]):
        if wrong := set(entry) - ENTRY:
            raise SystemExit(f"{path.name}: {sorted(wrong)} in {entry}; there are {', '.join(sorted(ENTRY))}")
        if entry.get("set") and not entry.get("note"):
            raise SystemExit(f"{path.name}: {entry} changes settings and needs a note, or its results have no name")
        common = {"algo": "ppo", **{name: value for name, value in entry.items() if name not in ("tasks", "seeds")}}
        jobs += [{**common, "task": task, "seed": seed} for task, seed in product(entry["tasks"], entry["seeds"])]
    return jobs


def is_done(job, lines):
    """Whether one of the lines is the result of a job."""
    steps = job.get("steps")
    same = (line for line in lines if all(line.get(name) == job.get(name) for name in IDENTITY))
    return any(steps is None or steps <= line["steps"] < ROUNDED_UP * steps for line in same)


def read_lines(path):
    """The results in a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def command(job, args, minutes):
    """The command that runs a job."""
    words = [sys.executable, str(FOLDER / "learning.py"), job["task"], "--seeds", str(job["seed"])]
    given = {"device": args.device, "threads": args.threads, "out": args.out, "minutes": minutes, **job}
    for name in (
        "algo",
        "preset",
        "profile",
        "steps",
        "note",
        "device",
        "episodes",
        "execution",
        "threads",
        "out",
        "minutes",
    ):
        if given.get(name) is not None:
            words += [f"--{name}", str(given[name])]
    return [*words, "--set", *job["set"]] if job.get("set") else words


def describe(job):
    """A job in a few words."""
    return " ".join(str(job[name]) for name in ("task", "algo", "profile", "preset", "note", "steps") if job.get(name))


def run(job, args, end):
    """Run a job unless the time is over; whether it went wrong."""
    minutes = None if end is None else round((end - time.monotonic()) / 60, 2)
    if minutes is not None and minutes <= 0:
        return False
    code = subprocess.run(command(job, args, minutes), check=False).returncode
    if code:
        print(f"{describe(job)} seed {job['seed']} failed with exit code {code}", flush=True)
    return code != 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="*", help="names of lists in the file; none shows all")
    parser.add_argument("--file", type=Path, default=FOLDER / "jobs.yaml")
    parser.add_argument("--at-once", type=int, default=1, help="jobs at the same time")
    parser.add_argument("--threads", type=int, default=1, help="of each job")
    parser.add_argument("--device", default="cpu", help="of jobs that name none")
    parser.add_argument("--minutes", type=float, help="time limit of the whole command, without the last evaluations")
    parser.add_argument("--out", type=Path, help="file of results")
    args = parser.parse_args()
    if not args.lists:
        for name in yaml.safe_load(args.file.read_text()):
            jobs = read_jobs(args.file, [name])
            print(f"{name} ({len(jobs)} jobs)", *sorted({describe(job) for job in jobs}), sep="\n    ")
        return
    if args.out is None:
        parser.error("give --out, the file of results")
    end = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    lines, jobs = read_lines(args.out), read_jobs(args.file, args.lists)
    due = [job for job in jobs if not is_done(job, lines)]
    print(f"{len(jobs) - len(due)} of {len(jobs)} jobs are done already", flush=True)
    with ThreadPoolExecutor(args.at_once) as pool:
        failed = sum(pool.map(lambda job: run(job, args, end), due))
    lines = read_lines(args.out)
    left = [job for job in jobs if not is_done(job, lines)]
    print(f"{len(left)} of {len(jobs)} jobs are left, {failed} failed", *map(describe, left), sep="\n    ")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
