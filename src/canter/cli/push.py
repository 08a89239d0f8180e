"""`canter push`: publish the policy of a run on the Hugging Face Hub, with a page made from the run."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from canter.cli.errors import user_errors
from canter.cli.flags import RunPath
from canter.cli.runs import SavedRun, read_run
from canter.compat.checkpoints import import_state
from canter.utils.checkpoint import damaged_content, load_checkpoint, save_checkpoint
from canter.utils.files import open_read
from canter.utils.hub import upload
from canter.utils.logging import redact
from canter.utils.reading import read_json
from canter.utils.run_data import EVALUATION_NAME, MACHINE_NAME

# What loading a policy needs; the state of optimizers and of random numbers stays at home.
KEPT = ("format_version", "model_state_dict", "iter", "total_timesteps", "config", "environment")
# File of a run -> its name in the model. The Hub plays replay.mp4 beside the page.
COPIED = {name: name for name in ("metrics.jsonl", MACHINE_NAME, "curve.png")} | {"video.mp4": "replay.mp4"}
Repo = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="USER/NAME")]


def push(run: RunPath, repo: Repo, checkpoint: str | None = None, private: bool = False) -> int:
    """Publish the policy of a run on the Hugging Face Hub: weights, settings, scores, curve, film, and a page of them.

    Settings of logging services, whatever is named like a secret, and diffs of your code stay here.

    Args:
        run: Run directory, or a checkpoint in one.
        repo: Model to write, which is made if there is none; log in before with `hf auth login`.
        checkpoint: "best" or a file name; the newest checkpoint by default.
        private: Make a new model visible to you alone.
    """
    saved = read_run(run, None)
    with user_errors(), tempfile.TemporaryDirectory() as folder:
        write_model(saved, saved.checkpoint(checkpoint), Path(folder), repo)
        sizes = {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir())}
        address = upload(Path(folder), repo, private)
    print(f"  {'files':<12}{', '.join(f'{name} ({size / 1000:.0f} kB)' for name, size in sizes.items())}")
    print(f"  {'page':<12}{address}\n  {'next':<12}canter play hf://{repo}")
    return 0


def write_model(saved: SavedRun, checkpoint: Path, folder: Path, repo: str) -> None:
    """Write the files of a model: a run directory with one checkpoint, and its page."""
    with damaged_content(checkpoint):
        state = import_state(load_checkpoint(checkpoint, "cpu"))
        steps = int(state.get("total_timesteps", 0))
    state["config"] = public_settings(state.get("config") or saved.config)
    save_checkpoint(folder / "checkpoint_final.pt", {name: state[name] for name in KEPT if name in state})
    settings = public_settings(saved.config)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    for name, copy in COPIED.items():
        if (saved.path / name).is_file():
            with open_read(saved.path / name, saved.path) as file, open(folder / copy, "wb") as target:
                shutil.copyfileobj(file, target)
    scores = scores_at(saved.path, steps)
    if "episodes" in scores:
        shutil.copy(saved.path / EVALUATION_NAME, folder)
    page = model_card(repo, saved.task, settings, steps, scores, {path.name for path in folder.iterdir()})
    (folder / "README.md").write_text(page, encoding="utf-8")


def public_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those of logging services and without secrets."""
    return redact({name: value for name, value in config.items() if name not in ("logger_kwargs", "logger_backend")})


def scores_at(run: Path, steps: int) -> dict[str, Any]:
    """The evaluation that a run made at a number of steps: that of its end, or of its best checkpoint."""
    for name in (EVALUATION_NAME, "best.json"):
        if (run / name).is_file() and (scores := read_json(run / name, root=run)).get("step") == steps:
            return scores
    return {}


def model_card(
    repo: str, task: str, settings: Mapping[str, Any], steps: int, scores: Mapping[str, Any], files: set[str]
) -> str:
    """The page of a model, with the metadata by which the Hub lists and ranks it."""
    algorithm = str(settings["algorithm"]["class_name"])
    info: dict[str, Any] = {"library_name": "canter", "pipeline_tag": "reinforcement-learning"}
    info["tags"] = ["canter", "reinforcement-learning", "robotics", algorithm, task]
    score = ""
    if "eval/mean_reward" in scores:
        spread = f" ± {scores['eval/std_reward']:.1f}" if "eval/std_reward" in scores else ""
        score = f"{scores['eval/mean_reward']:.1f}{spread}"
        kind = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
        metric = {"type": "mean_reward", "name": "mean_reward", "value": score, "verified": False}
        result = {"task": kind, "dataset": {"name": task, "type": task}, "metrics": [metric]}
        info["model-index"] = [{"name": algorithm, "results": [result]}]
    run = settings.get("run") or {}
    rows = {"task": task, "algorithm": algorithm, "steps": f"{steps:,}", "seed": settings.get("seed")}
    rows |= {
        "environments": run.get("num_envs"),
        "return": score or "not evaluated",
        "episodes": scores.get("episodes"),
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items() if value is not None)
    film = '<video src="replay.mp4" controls autoplay loop muted></video>\n\n' if "replay.mp4" in files else ""
    curve = "![Learning curve](curve.png)\n\n" if "curve.png" in files else ""
    return (
        f"---\n{yaml.safe_dump(info, sort_keys=False, allow_unicode=True)}---\n\n# {algorithm} on {task}\n\n"
        f"A policy for `{task}`, trained by {algorithm} with canter.\n\n{film}| | |\n|---|---|\n{table}\n{curve}"
        f'## Use it\n\n```bash\npip install "canter[hub]"\ncanter play hf://{repo}\n```\n\n'
        f'```python\nimport canter\n\npolicy = canter.load("hf://{repo}")\nactions = policy.predict(obs)\n```\n\n'
        f"## Settings\n\n```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```\n"
    )
