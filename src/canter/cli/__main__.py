"""`canter <command>`: load the plugins, then run one command."""

import io
import sys
from collections.abc import Sequence

from canter import __version__
from canter.cli import COMMANDS, load_plugins
from canter.cli.errors import UserError, report, short_warnings

OVERVIEW = """canter {version}: robot learning

{commands}

canter <command> --help lists the flags; every setting is a flag. Tasks are Gymnasium ids (CartPole-v1),
torch-native environments (canter/CartPole), EnvPool environments (envpool/HalfCheetah-v5) and registered names."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of the table; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # of a terminal that cannot show every character
    name, *args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "help" and args:
        name, args = args[0], ["--help"]
    if name in ("--version", "version"):
        print(__version__)
        return 0
    try:
        load_plugins()
        if name in ("-h", "--help", "help"):
            rows = [(f"{name} {command.arguments}", command.help) for name, command in COMMANDS.items()]
            width = max(len(words) for words, _ in rows)
            commands = "\n".join(f"  {words:<{width}}  {text}" for words, text in rows)
            print(OVERVIEW.format(version=__version__, commands=commands))
            return 0
        if name not in COMMANDS:
            from canter.utils.config import unknown_name

            raise UserError(unknown_name("command", name, COMMANDS))
        from canter.cli.flags import call

        with short_warnings():
            code = call(COMMANDS[name].run, args, f"canter {name}") or 0
        sys.stdout.flush()  # an error of it is reported here
        return code
    except (Exception, KeyboardInterrupt) as error:
        return report(error)


if __name__ == "__main__":
    sys.exit(main())
