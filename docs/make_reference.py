"""Write the reference, one page for each package, and `api.md`, the table of every public name.

python docs/make_reference.py           # tests/test_docs.py fails where the pages differ from the code
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).parent
# Page -> its title, and modules whose `__all__`, or own public functions and classes, are public.
PAGES = {
    "environments": ("Environments", ["canter.envs", "canter.envs.torch_envs"]),
    "policies": ("Policies and networks", ["canter.modules", "canter.modules.actors"]),
    "algorithms": ("Algorithms", ["canter.algorithms", "canter.algorithms.optim"]),
    "runners": ("Runners", ["canter.runners", "canter.runners.evaluation", "canter.presets"]),
    "storage": (
        "Storage and recorded data",
        ["canter.storage", "canter.storage.rollout_files", "canter.storage.offline", "canter.datasets"],
    ),
    "deploy": (
        "Deploy",
        [
            "canter",
            "canter.export.bundle",
            "canter.export.deploy",
            "canter.export.parity",
            "canter.export.runtime",
            "canter.export.scene",
            "canter.export.sources",
        ],
    ),
    "tools": (
        "Logging, settings and commands",
        ["canter.utils.logging", "canter.utils.films", "canter.utils.plots", "canter.utils.config", "canter.cli"],
    ),
}
# Names that are no functions or classes, and so have no docstring.
CONSTANTS = {
    "TORCH_ENVS": "Torch-native environments by their name after `canter/`.",
    "NETWORKS": "Network classes that settings may name.",
    "POLICIES": "Policy classes that settings may name; `register_policy` adds to it.",
    "REGISTRY": "Algorithms by name; `register_algorithm` adds to it.",
    "RUNNERS": "Runner classes by name.",
    "GET_PROB_FUNC": "Decays of `teacher_act_prob` and `distillation_loss_coef` by name.",
    "CLIPS": "Directory of the motion clips that come with canter.",
    "METRICS_NAME": "Name of the file with the metrics of a run.",
    "FORMATS": "Formats of an exported policy.",
}

# In the search a title weighs as much as a thousand words of text; at full weight the reference would hide the guides.
BELOW_GUIDES = ["---", "search: {boost: 0.001}", "---", ""]


def public_names(module: ModuleType) -> list[str]:
    """The names of `__all__`, else the public functions and classes that the module defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__, key=str.lower)
    values = (
        (name, value) for name, value in vars(module).items() if inspect.isclass(value) or inspect.isroutine(value)
    )
    own = [name for name, value in values if value.__module__ == module.__name__]
    return sorted((name for name in own if not name.startswith("_")), key=str.lower)


def sentence(name: str, value: Any) -> str:
    """The first sentence of a docstring, for a table."""
    if not (inspect.isclass(value) or callable(value)):
        return CONSTANTS[name]
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    if inspect.isclass(value) and (not text or value.__doc__ is None):
        return f"A class; a {value.__mro__[1].__name__}."
    return text.replace("|", "\\|")


def pages() -> dict[str, str]:
    """The text of every page by its path below docs/."""
    found: dict[str, str] = {}
    index = ["# Reference", "", "Every public name, with its first sentence. The pages have arguments and methods."]
    for page, (title, modules) in PAGES.items():
        lines, listed = [*BELOW_GUIDES, f"# {title}"], set[int]()
        index += ["", f"## {title}", "", f"[Arguments and methods](reference/{page}.md)"]
        for name in modules:
            module = importlib.import_module(name)
            names = [public for public in public_names(module) if id(getattr(module, public)) not in listed]
            listed.update(id(getattr(module, public)) for public in names)
            lines += ["", f"## {name}", "", *(f"::: {name}.{public}" for public in names)]
            index += ["", f"### {name}", "", "| name | |", "|---|---|"]
            index += [f"| `{public}` | {sentence(public, getattr(module, public))} |" for public in names]
        found[f"reference/{page}.md"] = "\n".join([*lines, ""])
    return found | {"api.md": "\n".join([*index, ""])}


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
