"""Writes mjlab_configs.json: the training configuration of every task that mjlab registers (1.6.0 was used).

pip install mjlab && python tests/runners/rsl_rl/make_configs.py
"""

import dataclasses
import json
from pathlib import Path

import mjlab.tasks  # noqa: F401 (registers them)
from mjlab.tasks.registry import list_tasks, load_rl_cfg

configs = {task: dataclasses.asdict(load_rl_cfg(task)) for task in list_tasks()}
Path(__file__).with_name("mjlab_configs.json").write_text(json.dumps(configs) + "\n")
