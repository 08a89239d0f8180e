"""Writes the training dicts of mjlab's and Isaac Lab's tasks (mjlab 1.6.0, Isaac Lab 2.3.2 and 3.0.0 were used).

pip install mjlab && python tests/compat/rsl_rl/make_configs.py
pip install isaaclab==3.0.0 && python tests/compat/rsl_rl/make_configs.py 3.0.0

Those of Isaac Lab are written as its train script gives them to the runner, one for each set of keys and classes.
"""

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import json
import sys
from pathlib import Path


def mjlab():
    """Dicts by task."""
    import mjlab.tasks  # noqa: F401 (registers them)
    from mjlab.tasks.registry import list_tasks, load_rl_cfg

    return {task: dataclasses.asdict(load_rl_cfg(task)) for task in list_tasks()}


def isaac_lab(version):
    """Dicts by version, folder and class; the packages of the tasks need a simulator, these files do not."""
    from isaaclab.utils import to_dict
    from isaaclab_rl import rsl_rl

    root, kinds, made = Path(importlib.util.find_spec("isaaclab_tasks").origin).parent, {}, {}
    bases = (rsl_rl.RslRlOnPolicyRunnerCfg, rsl_rl.RslRlDistillationRunnerCfg)
    for file in sorted(root.rglob("agents/rsl_rl*cfg.py")):
        spec = importlib.util.spec_from_file_location("_".join(file.relative_to(root).with_suffix("").parts), file)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            print(f"without {file}: {error}")
        for name, cls in vars(module).items():
            if not inspect.isclass(cls) or not issubclass(cls, bases) or cls.__module__ != spec.name:
                continue
            cfg = cls()
            if not isinstance(cfg.max_iterations, int) or isinstance(getattr(cfg, "actor", None), tuple):
                continue  # presets of Hydra, which the train script resolves
            if version >= "3":
                cfg = rsl_rl.handle_deprecated_rsl_rl_cfg(cfg, importlib.metadata.version("rsl-rl-lib"))
            made[f"{version} {file.parent.parent.relative_to(root)}:{name}"] = to_dict(cfg)
    for name, cfg in made.items():
        kinds.setdefault(signature(cfg), name)
    return {name: made[name] for name in kinds.values()}


def signature(value, key=""):
    """Keys, classes and types of a dict."""
    if isinstance(value, dict):
        return tuple(sorted((name, signature(part, name)) for name, part in value.items()))
    return str(value) if key.endswith(("class_name", "_type")) else type(value).__name__


if len(sys.argv) == 1:
    path, configs = Path(__file__).with_name("mjlab_configs.json"), mjlab()
else:
    path = Path(__file__).with_name("isaac_lab_configs.json")
    others = {name: cfg for name, cfg in json.loads(path.read_text()).items() if not name.startswith(sys.argv[1])}
    configs = others | isaac_lab(sys.argv[1])
path.write_text(json.dumps(configs) + "\n")
