"""`canter <command>`; every command imports what it needs when it is run, so that help comes at once."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from canter import __version__
from canter.cli.errors import USAGE, exit_code, report

# command -> (module with `main(args) -> exit code`, what it does)
COMMANDS = {
    "train": ("canter.cli.train", "train TASK: train a policy, evaluate it, draw its curve and film it"),
    "resume": ("canter.cli.resume", "resume RUN: continue a run from its newest valid checkpoint"),
    "eval": ("canter.cli.evaluate", "eval RUN: play episodes without noise and print their returns"),
    "play": ("canter.cli.play", "play RUN: watch the policy in a window or write a video"),
    "plot": ("canter.cli.plot", "plot RUN...: learning curves, mean and spread over seeds"),
    "tasks": ("canter.cli.tasks", "tasks: what can be trained, and which tasks have settings of their own"),
    "check-env": (
        "canter.cli.check",
        "check-env TASK: how canter understands an environment, and what is wrong with it",
    ),
    "collect": ("canter.cli.collect", "collect RUN: let a policy play and save its trajectories"),
    "dagger": ("canter.cli.dagger", "dagger TEACHER: train a student on what its teacher would do where it goes"),
    "distill": ("canter.cli.distill", "distill TEACHER: train a student that sees less to do what its teacher does"),
    "motion": ("canter.cli.motion", "motion FILE: check a motion clip, say what it holds, draw it"),
    "bench": ("canter.cli.bench", "bench [iteration|cpu|scaling]: how fast canter is on this machine"),
}


def usage() -> str:
    """The overview."""
    lines = [f"  {what}" for _, what in COMMANDS.values()]
    return "\n".join(
        [
            f"canter {__version__}: teaches robots to move",
            "",
            *lines,
            "",
            "canter <command> --help lists the flags; every setting is one. Tasks are Gymnasium ids (CartPole-v1),",
            "torch-native environments (canter/CartPole) and EnvPool's (envpool/HalfCheetah-v5).",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    command, *args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage())
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"canter: no command {command!r}; {hint}", file=sys.stderr)
        return USAGE
    try:
        return importlib.import_module(COMMANDS[command][0]).main(args)
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(error)
        if code is None:
            raise
        report(error)
        return code


if __name__ == "__main__":
    sys.exit(main())
