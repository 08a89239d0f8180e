"""Run directories, and the environments and runners that they describe."""

import os
import re
import shutil
import sys
import time
import unicodedata
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import torch

from canter.algorithms import REGISTRY
from canter.cli import named_plugins
from canter.cli.errors import UserError, user_errors
from canter.envs.torch_envs import TORCH_ENVS
from canter.envs.vec_env import VecEnv
from canter.envs.wrap import ENV_NAMES, env_options, import_named, make_env
from canter.export.load import read_settings
from canter.runners import Runner, build_runner
from canter.runners.evaluation import EVAL_ENVS
from canter.runners.run_config import find_algorithm, parse_train_cfg
from canter.utils.checkpoint import is_own_file, newest_valid_checkpoint
from canter.utils.config import nearest, unknown_name
from canter.utils.distributed import RANKS
from canter.utils.files import RunLock
from canter.utils.hub import local_run
from canter.utils.logging import METRICS_NAME, loaded_settings
from canter.utils.metrics import DivergedError
from canter.utils.reading import read_yaml, refuse_imports
from canter.utils.run_data import find_runs
from canter.utils.runtime import resolve_device, usable_cores
from canter.utils.tree import tree_leaves

EVAL_SEED_OFFSET = 1_000_003
BEST_NAME = "checkpoint_best.pt"
# Settings that flags of `canter resume` change, and logging settings, of which only some are loaded.
CHANGING = ("device", "logger_kwargs", "max_iterations", "max_timesteps", "run.total_timesteps")
SMALL_WORK = 1e8  # multiplications per minibatch


class SavedRun(NamedTuple):
    """A run directory and the content of its config.yaml."""

    path: Path
    config: dict[str, Any]
    file: Path | None = None  # The checkpoint that was named in place of the directory.

    @property
    def task(self) -> str:
        """The task that the run was trained on."""
        return self.config["run"]["task"]

    def checkpoint(self, wanted: str | None) -> Path:
        """The checkpoint to use: the one that was named, "best", a file, or by default the newest valid one."""
        if self.file is not None and wanted is not None:
            raise UserError(f"{self.file} is a checkpoint already; leave out --checkpoint {wanted}")
        return self.file or find_checkpoint(self.path, wanted)


def new_run_directory(runs_dir: Path, task: str, name: str | None, seed: int | None) -> Path:
    """A path for a new run: <runs_dir>/<task>/<name or time>-seed<k>.

    It does not exist yet, or it has the name that was asked for and holds a run that ended before its first checkpoint.
    """
    folder = runs_dir.joinpath(*(safe_name(part) for part in task.split("/")))
    stem = safe_name(name) if name else time.strftime("%Y%m%d-%H%M%S")
    path = folder / f"{stem}-seed{seed}"
    if name and path.is_dir() and is_unsaved(path):
        RunLock(path).release()  # an error, if that run is still going on
        return path
    if name and path.exists():
        raise UserError(f"{path} exists; choose another --name, or continue it with: canter resume {path}")
    others = (folder / f"{stem}-{n}-seed{seed}" for n in range(2, 1000))
    return next(p for p in (path, *others) if not p.exists())


def is_unsaved(path: Path) -> bool:
    """Whether a directory is empty or holds a run without any checkpoint."""
    names = [entry.name for entry in path.iterdir() if not entry.name.startswith(".")]
    return not any(path.glob("*.pt")) and ("config.yaml" in names or not names)


def restarted_run(runs_dir: Path, task: str, seed: int | None) -> Path | None:
    """The run that this launch of torchrun began before it restarted the ranks; None in the first attempt."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return None
    folder = runs_dir.joinpath(*(safe_name(part) for part in task.split("/")))
    for config in sorted(folder.glob(f"*-seed{seed}/config.yaml"), key=lambda file: -file.stat().st_mtime):
        run = read_yaml(config, config.parent).get("run") or {}
        if run.get("launch") == os.environ["TORCHELASTIC_RUN_ID"]:
            return config.parent
    return None


def safe_name(text: str) -> str:
    """A name that is a single directory on every system; letters and signs outside of ASCII are kept."""
    kept = (c if c.isprintable() and not c.isspace() else "_" for c in unicodedata.normalize("NFC", text))
    return re.sub(r"[^\w.\u0080-\U0010ffff-]", "_", "".join(kept)).lstrip(".") or "_"


def read_run(
    path: Path, modules: Collection[str] | None = (), settings: Path | None = None, task: str | None = None
) -> SavedRun:
    """The run in a directory, or of a checkpoint in one; its settings may import `modules` alone, None: unused.

    The run of another program has its training dict in the file `settings`, or in params/agent.yaml, and needs a task.
    """
    with user_errors():
        path = local_run(path)
    file, path = (path, path.parent) if path.is_file() else (None, path)
    if file is not None and file.suffix not in (".pt", ".yaml"):
        raise UserError(f"{file} is neither a run directory nor a checkpoint")
    config_path = path / "config.yaml"
    found = settings or next((p for p in (config_path, path / "params" / "agent.yaml") if p.is_file()), None)
    if found is not None and (found != config_path or task is not None):
        return foreign_run(path, file, found, task, modules)
    if not config_path.is_file():
        problem = f"{path} is not a run directory: it has no config.yaml"
        if (path / "policy.json").is_file():
            raise UserError(f"{path} is a bundle, not a run; `canter play` and `canter export --check` take bundles")
        raise UserError((problem if path.is_dir() else f"there is no run directory {path}") + nearest_run(path))
    with user_errors():
        config = read_yaml(config_path, path)
        if modules is not None:
            refuse_imports(config, config_path, {*modules, *named_plugins()}, "add --modules {module}")
            for plugin in (config.get("run") or {}).get("plugins") or ():
                import_named(plugin)
    run = config.get("run")
    if not isinstance(run, dict) or not isinstance(run.get("task"), str):
        way_out = "add it there, as in `run: {task: CartPole-v1}`, or give the runner run_info={'task': 'CartPole-v1'}"
        raise UserError(f"{config_path} does not name the task; {way_out}; canter.load needs no task")
    for name in ("num_envs", "total_timesteps"):
        if name in run and (type(run[name]) is not int or run[name] < 1):
            raise UserError(f"{config_path}: run.{name} must be a whole number of at least 1, got {run[name]!r}")
    return SavedRun(path, config, file if file != config_path else None)


def foreign_run(
    path: Path, file: Path | None, settings: Path, task: str | None, modules: Collection[str] | None
) -> SavedRun:
    """A run with its settings in a file of their own, in canter's layout."""
    with user_errors(settings):
        content = read_settings(settings)
        if modules is not None:
            refuse_imports(content, settings, modules, "add --modules {module}")
        named = task or (content.get("run") or {}).get("task") or content.get("task")
        if not isinstance(named, str):
            raise UserError(f"{settings} names no task; give it: --task NAME")
        run = {"num_envs": EVAL_ENVS, **(content.pop("run", None) or {}), "task": named}
        config = parse_train_cfg({**content, "resume": False}).to_dict()
    return SavedRun(path, {**config, "run": run, "seed": content.get("seed")}, file)


def changed_settings(config: Mapping[str, Any], saved: Any) -> list[str]:
    """The settings of a config.yaml that differ from those in the checkpoint, but those that a resume may change."""
    new, old = dict(tree_leaves(config)), dict(tree_leaves(saved)) if isinstance(saved, Mapping) else {}
    names = [name for name in ({**old, **new} if old else ()) if not name.startswith(CHANGING)]
    return [f"{n} is {new.get(n)!r}, was {old.get(n)!r}" for n in names if new.get(n) != old.get(n)]


def take_logger_settings(runner: Runner, given: dict[str, Any] | None = None) -> None:
    """Leave out the logging settings of a loaded config that name hosts, keys, accounts, paths or code."""
    with user_errors():
        kept, left_out = loaded_settings(runner.cfg.logger_backend, runner.cfg.logger_kwargs, given)
    runner.cfg.logger_kwargs = {name: settings for name, settings in kept.items() if settings} or None
    if left_out:
        example = f"--logger-kwargs '{{{left_out[0].replace('.', ': {', 1)}: ...}}}}'"
        way_out = f"if you trust them, give them again: {example}, or as environment variables of the service"
        print(f"  not used: {', '.join(left_out)} of the run's config.yaml; {way_out}", file=sys.stderr)


def nearest_run(path: Path) -> str:
    """A suggestion for a wrong run directory, from the runs below it, beside it, or in runs/."""
    folder = next((p for p in (path, path.parent) if p.is_dir() and p.resolve() != Path.cwd()), Path("runs"))
    runs = [config.parent for depth in (1, 2, 3) for config in folder.glob("*/" * depth + "config.yaml")]
    runs.sort(key=lambda run: run.stat().st_mtime, reverse=True)
    near = nearest(path.name, [run.name for run in runs])
    chosen = [run for run in runs if run.name == near] or runs
    return f"; did you mean {chosen[0]}?" if chosen else ""


def runs_below(paths: Iterable[Path]) -> list[Path]:
    """The run directories among and below these directories; files, which a pattern may add, are skipped."""
    found: list[Path] = []
    for path in (path for path in paths if not path.is_file()):
        try:
            found += find_runs(path)
        except FileNotFoundError as error:
            raise UserError(f"{error}{nearest_run(path)}") from error
    return list(dict.fromkeys(found))


def find_checkpoint(run: Path, wanted: str | None) -> Path:
    """A checkpoint of a run: "best", a file, or by default the newest valid one."""
    if wanted is None:
        with user_errors():
            return newest_valid_checkpoint(run)
    named = [run / BEST_NAME] if wanted == "best" else [Path(wanted), run / wanted]
    for path in named:
        if path.is_file() and (wanted != "best" or is_own_file(path)):
            return path
    existing = ", ".join(path.name for path in sorted(run.glob("*.pt")))
    raise UserError(f"there is no checkpoint {named[0]}; {run} has {existing}")


def open_env(
    task: str,
    num_envs: int,
    device: str | None = None,
    seed: int | None = None,
    render_mode: str | None = None,
    **options: Any,
) -> VecEnv:
    """Environments by the name of their task, with the `env_options` of a run."""
    spec = gymnasium.registry.get(task)
    if spec is None and any(known.rpartition("-v")[0] == task for known in gymnasium.registry):
        raise UserError(unknown_task(task))  # Gymnasium would take the newest version without a word
    entry_point = "" if spec is None else str(spec.entry_point)
    if "mujoco" in entry_point:
        with suppress(ImportError):
            import mujoco

            mujoco.set_mju_user_warning(print_mujoco_warning)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with user_errors(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Gymnasium warns, then refuses
            return make_env(task, resolve_device(device), num_envs, seed, render_mode, **options)
    except UserError as error:
        cause = error.__cause__
        if isinstance(cause, gymnasium.error.DependencyNotInstalled):
            extra = next((extra for extra in ("box2d", "mujoco") if extra in entry_point), None)
            hint = cause if extra is None else f'pip install "canter[{extra}]"'
            raise UserError(f"{task} needs a package that is not installed: {hint}") from cause
        if isinstance(cause, (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound)):
            raise UserError(unknown_task(task)) from cause
        raise


@cache
def print_mujoco_warning(text: str) -> None:
    """Print a MuJoCo warning once; MuJoCo repeats it for every environment it loads."""
    if "deprecated" not in text:  # about the models in Gymnasium, which a user cannot change
        print(f"MuJoCo: {text}", file=sys.stderr)


def unknown_task(task: str) -> str:
    """The message for a task that does not exist; versions alone make no names similar."""
    newest = {known.rpartition("-v")[0] or known: known for known in known_tasks()}
    near = nearest(task.rpartition("-v")[0] or task, newest)
    package = "" if ":" in task else f"; if a package registers it, name that in front: package:{task}"
    return unknown_name("task", task, [newest[near]] if near else [], otherwise=f"`canter tasks` lists them{package}")


def known_tasks() -> list[str]:
    """Every Gymnasium id, torch-native task and full name of `register_env`; a prefix names no task."""
    removed = "_raise_mujoco_py_error"  # all that is left in Gymnasium of tasks such as Hopper-v3
    ids = (name for name, spec in gymnasium.registry.items() if getattr(spec.entry_point, "__name__", "") != removed)
    native = [f"canter/{name}" for name in TORCH_ENVS]
    return sorted(ids) + sorted({*native, *(name for name in ENV_NAMES if "/" in name)})


def open_runner(
    config: dict[str, Any], log_dir: Path | None = None, eval_episodes: int = 0, show_progress: bool = True
) -> Runner:
    """The runner that a config.yaml describes, with its environments."""
    run, seed, eval_env = config["run"], config.get("seed"), None
    where = {"device": config.get("device"), **env_options(run)}
    if RANKS.size > 1:
        where["device"] = str(RANKS.start(resolve_device(where["device"])))  # this rank's own GPU
    workers: dict[str, Any] = {"num_workers": min(run.get("workers") or 0, run["num_envs"])}
    if workers["num_workers"]:
        workers |= {"timeout": run.get("worker_timeout", 300.0), "restart": bool(run.get("restart_workers"))}
    env_seed = None if seed is None else seed + RANKS.rank * run["num_envs"]
    env = open_env(run["task"], run["num_envs"], seed=env_seed, **where, **workers)
    if eval_episodes and RANKS.is_first:
        eval_seed = None if seed is None else seed + EVAL_SEED_OFFSET
        eval_env = open_env(run["task"], min(EVAL_ENVS, eval_episodes), seed=eval_seed, **where)
    settings = {key: value for key, value in config.items() if key != "run"}
    with user_errors(), warnings.catch_warnings():
        # EnvPool environments got their seed when they were made, above.
        warnings.filterwarnings("ignore", message=".*seeded when it is made")
        agent_class = REGISTRY[find_algorithm((config.get("algorithm") or {}).get("class_name", "PPO"))].agent_class
        name = run.get("runner") or ("OffPolicyRunner" if agent_class.learns_from_replay else "OnPolicyRunner")
        options = {"log_dir": log_dir, "eval_env": eval_env, "run_info": run, "show_progress": show_progress}
        dataset = settings.get("pretrain_dataset")
        if dataset and log_dir is not None and isinstance(dataset.get("data_dir"), str):  # relative to the run
            settings["pretrain_dataset"] = {**dataset, "data_dir": str(log_dir / dataset["data_dir"])}
        runner: Any = build_runner(name, env, settings, **options)
        if dataset:
            runner.pretrain_dataset = dict(dataset)  # written to config.yaml as it was
        return runner


def new_runner(config: dict[str, Any], path: Path, fits_evaluations: bool = False) -> Runner:
    """The runner of a new run with open logs; leaves no directory behind if it cannot be built.

    With `fits_evaluations` no evaluation takes more steps than the training since the last one.
    """
    try:
        runner = open_runner(config, path, eval_episodes=config["eval_episodes"])
        if fits_evaluations:
            fit_evaluations(runner)
        with user_errors(), ExitStack() as on_error:
            on_error.callback(runner.close)  # so that nothing writes to the directory any more
            runner.alg.check_can_learn(runner.is_pretraining)
            if (path / METRICS_NAME).is_file():
                runner.resumed_at = 0  # the log of a run that ended before its first checkpoint is dropped
            runner.init_writer()  # finds a missing logging backend before the training
            on_error.pop_all()
    except UserError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return runner


def fit_evaluations(runner: Runner) -> None:
    """Raise `eval_interval` until an evaluation takes no more steps than the training between two of them."""
    cfg, length = runner.cfg, runner.env.max_episode_length
    if cfg.eval_interval and length and cfg.trial_metric is None:
        unit = 1 if runner.alg.learns_from_replay else runner.steps_per_iteration()
        cfg.eval_interval = max(cfg.eval_interval, -(-cfg.eval_episodes * int(length) // unit))


def load_policy(saved: SavedRun, checkpoint: Path, num_envs: int, seed: int | None, device: str | None) -> Runner:
    """A runner with the trained policy and new environments that writes no files."""
    run = {**saved.config["run"], "num_envs": num_envs}
    config = {**saved.config, "run": run, "seed": seed, "device": device or "cpu"}
    with user_errors(saved.path / "config.yaml"):
        runner = open_runner(config, show_progress=False)
        limit_threads(runner, None)
    with user_errors(checkpoint):
        runner.load(checkpoint, load_optimizer=False)
    weights = [(name, value) for name, value in runner.policy.state_dict().items() if value.is_floating_point()]
    if bad := [name for name, value in weights if value.isnan().any()]:
        ways = "choose an earlier one with --checkpoint, or train again with a lower learning rate"
        raise DivergedError(f"{checkpoint} holds a policy that diverged: {bad[0]!r} has NaN values; {ways}")
    return runner


def limit_threads(runner: Runner, threads: int | None) -> None:
    """Use one torch thread for small minibatches of small networks, where splitting the work costs more than it."""
    if threads is None and runner.device.type == "cpu":
        parameters = sum(p.numel() for p in runner.policy.parameters())
        whole = getattr(runner.cfg, "batch_size", None) or runner.steps_per_iteration() / runner.cfg.num_mini_batches
        threads = 1 if parameters * whole < SMALL_WORK else None
    if threads is not None:
        torch.set_num_threads(min(threads, usable_cores()))  # the run may come from a larger machine
