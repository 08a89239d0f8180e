"""What a script says of one run: everything but its curve on the screen, all of it as a line of JSON in a file."""

from __future__ import annotations

import json


def report(result, out=None):
    """Print the result, and append it to the file `out` if there is one."""
    print({name: value for name, value in result.items() if name != "curve"})
    if out:
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
