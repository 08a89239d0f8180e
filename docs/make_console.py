"""Draws docs/assets/console.svg: what the console showed during a run, from its metrics.

python docs/make_console.py RUN --iteration 120
"""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path
from unittest import mock

from rich.console import Console as RichConsole

from canter.cli.runs import read_run
from canter.utils.console import Console

OUT = Path(__file__).parent / "assets" / "console.svg"


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--iteration", type=int, required=True)
    options = parser.parse_args()
    run = read_run(options.run)
    entries = [json.loads(line) for line in (options.run / "metrics.jsonl").read_text().splitlines()]
    entries = [entry for entry in entries if "iteration" in entry]
    steps_of_iteration = run.config["run"]["num_envs"] * run.config.get("num_steps_per_env", 1)
    iterations = -(-run.config["run"]["total_timesteps"] // steps_of_iteration)
    first = 2 * entries[0]["time"] - entries[1]["time"]
    with mock.patch("canter.utils.console.time.monotonic", side_effect=lambda: now - first):  # the clock of the run
        now = first
        path = Path("runs", run.task, options.run.name)
        shown = Console(iterations, run.task, path=path, stream=io.StringIO())
        for entry in entries[: options.iteration]:
            now, iteration, steps = entry.pop("time"), entry.pop("iteration"), entry.pop("step")
            shown.update(int(iteration), int(steps), entry)
        screen = RichConsole(record=True, width=88, file=io.StringIO(), force_terminal=True)
        screen.print(shown._picture(screen.width))
    picture = screen.export_svg(title=f"canter train {run.task}")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # nothing is loaded from elsewhere
    OUT.write_text(picture.replace("Fira Code, monospace", "monospace"), encoding="utf-8")


if __name__ == "__main__":
    main()
