"""`canter export`: write the bundle of a trained policy, or check one."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from canter.cli.errors import UserError, user_errors
from canter.cli.flags import RunPath
from canter.cli.runs import find_checkpoint, open_env, read_run
from canter.envs.vec_env import VecEnv
from canter.envs.wrap import env_options
from canter.export.bundle import FORMATS, ROWS, Exported, export_bundle, upload_bundle
from canter.export.load import load
from canter.export.parity import check_bundle
from canter.export.robot.c_loop import write_c_loop
from canter.export.robot.description import load_robot
from canter.export.robot.package import write_ros2
from canter.runners.construction import open_env as with_policy_form
from canter.runners.evaluation import InferencePolicy
from canter.runners.run_config import parse_train_cfg
from canter.utils.checkpoint import find_checkpoints
from canter.utils.files import atomic_write, make_folder
from canter.utils.hub import local_run
from canter.utils.logging import Logger, loaded_settings
from canter.utils.reading import named_modules


def export(
    path: RunPath,
    out: Path | None = None,
    checkpoint: str | None = None,
    every_checkpoint: bool = False,
    formats: tuple[Literal["onnx", "torchscript", "c"], ...] = FORMATS,
    env_samples: bool = True,
    upload: bool = False,
    check: bool = False,
    robot: Path | None = None,
    ros2: Path | None = None,
    c_loop: Path | None = None,
    config: Path | None = None,
    task: str | None = None,
    modules: tuple[str, ...] = (),
    logger_kwargs: dict[str, Any] | None = None,
) -> int:
    """Write ONNX, TorchScript and C files of a trained policy, and check that they do what it does.

    Args:
        path: The run directory or a checkpoint file; with --check, --ros2 or --c-loop also a bundle.
        out: Directory of the bundle; <run>/export/<checkpoint> by default.
        checkpoint: A file of the run, or "best"; the newest valid checkpoint by default.
        every_checkpoint: Export every model_<number>.pt of the run.
        formats: Formats to write; ONNX is always written.
        env_samples: Record the samples in the run's environment; without it they are drawn from statistics.
        upload: Store the files with the run in its logging backends, such as W&B.
        check: Check a bundle instead: hashes, then every format on the recorded samples. This compiles and runs its
            policy.c: check bundles of people you trust.
        robot: The robot.json to put into the bundle: limits, sensors and modes of the robot.
        ros2: Folder of a ROS 2 package to write, which runs the bundle.
        c_loop: Folder to write the whole control loop to, in C.
        config: Training dict of a checkpoint without one, of another library; by default params/agent.yaml of its run.
        task: Task of a checkpoint that names none; it gives observations and actions their names.
        modules: Modules that the run's settings name, such as that of its task, and that may be imported.
        logger_kwargs: Settings of the logging backends for --upload, as YAML; see `canter resume`.
    """
    if check:
        with user_errors():
            show_parity(check_bundle(path))
        return 0
    with user_errors():
        path = local_run(path)
    for_robot = (robot, ros2, c_loop) != (None, None, None)
    if for_robot and (path / "policy.json").is_file():
        write_robot_files(path, robot, ros2, c_loop)
        return 0
    if every_checkpoint and for_robot:
        raise UserError("--robot, --ros2 and --c-loop are for one bundle; leave --every-checkpoint out")
    if every_checkpoint and (checkpoint is not None or path.is_file()):
        raise UserError("--every-checkpoint exports all checkpoints of a run directory; leave --checkpoint out")
    run = path.parent if path.is_file() else path
    if every_checkpoint:
        files = [file for _, file in find_checkpoints(run)] if run.is_dir() else []
        if not files:
            raise UserError(f"there is no model_<number>.pt in {run}")
    else:
        # The run of another program may have no config.yaml.
        is_foreign = run.is_dir() and any(run.glob("*.pt")) and not (run / "config.yaml").exists()
        folder = run if is_foreign or path.is_file() else read_run(run, None).path
        files = [path if path.is_file() else find_checkpoint(folder, checkpoint)]
    root = out or run / "export"
    if out is None:
        make_folder(root, run)
    for file in files:
        with user_errors():
            acting = load(file, modules=modules, config=config, task=task)
            target = root / file.stem if every_checkpoint or out is None else root
            with sample_env(acting, env_samples, modules) as env:
                made = export_bundle(acting, target, env, formats)
        show(made)
        write_robot_files(made.path, robot, ros2, c_loop)
        if upload:
            send(made, acting, run, logger_kwargs)
    return 0


def write_robot_files(bundle: Path, robot: Path | None, ros2: Path | None, c_loop: Path | None) -> None:
    """Put a robot.json into a bundle, and write the ROS 2 package and the control loop in C that are asked for."""
    with user_errors():
        if robot is not None:
            load_robot(bundle, robot)  # a wrong one is refused before it is copied
            atomic_write(bundle / "robot.json", robot.read_bytes())
        if ros2 is not None:
            write_ros2(bundle, ros2)
            print(f"  ROS 2       {ros2}")
        if c_loop is not None:
            write_c_loop(load_robot(bundle), c_loop)
            print(f"  C loop      {c_loop}")


@contextmanager
def sample_env(acting: InferencePolicy, is_wanted: bool, modules: Collection[str] = ()) -> Iterator[VecEnv | None]:
    """The environment of the run, to record samples in; None, with a note, if there is none."""
    config, env = acting.info["config"], None
    run = config.get("run") or {}
    unnamed = [module for _, module in named_modules({"run": run}) if module not in modules]
    if is_wanted and unnamed:
        why = f"would import a module, so it is not made without --modules {' '.join(unnamed)}"
        print(f"  the task {run['task']!r} {why}; samples are drawn from statistics")
    elif is_wanted and "task" in run:
        try:
            plan = parse_train_cfg({name: value for name, value in config.items() if name != "run"})
            made = open_env(run["task"], ROWS, "cpu", 0, **env_options(run))
            env = with_policy_form(made, made.device, plan)
        except (UserError, RuntimeError, OSError) as error:
            print(f"  the environment cannot be made ({error}); samples are drawn from statistics")
    try:
        yield env
    finally:
        if env is not None:
            env.close()


def show(made: Exported) -> None:
    """Print where a bundle is, its files and their parity."""
    print(f"  bundle      {made.path}")
    show_parity(made.parity, made.path)
    show_scene(made.checked)
    for name, reason in made.left_out.items():
        print(f"  {name:<12}not written: {reason}")


def show_scene(checked: Mapping[str, Any] | None) -> None:
    """Print how far the observation of a MuJoCo scene is from the simulator's, and what a scene cannot provide."""
    if checked is None:
        return
    if "problem" in checked:
        print(f"  scene       not checked: {checked['problem']}")
        return
    known = {name: value for name, value in checked["segments"].items() if value is not None}
    if known:
        worst = max(known, key=lambda name: known[name])
        text = f"{len(known)} segments as in the simulator, largest difference {known[worst]:.1e} ({worst})"
        print(f"  scene       {text}")
    if unknown := [name for name in checked["segments"] if name not in known]:
        print(f"  scene       cannot provide {', '.join(unknown)}")


def show_parity(parity: dict[str, float], path: Path | None = None) -> None:
    """Print the largest difference of every file from the recorded samples."""
    for name, value in parity.items():
        size = "" if path is None else f"{(path / name).stat().st_size:>10} bytes   "
        text = "not checked: no C compiler" if math.isnan(value) else f"largest difference {value:.1e}"
        print(f"  {name:<12}{size}{text}")


def send(made: Exported, acting: InferencePolicy, run: Path, given: dict[str, Any] | None = None) -> None:
    """Store the bundle with the run's logging backends, with the settings that may be loaded and those given."""
    config: dict[str, Any] = acting.info["config"]
    with user_errors():
        settings, left_out = loaded_settings(config.get("logger_backend"), config.get("logger_kwargs"), given)
        if left_out:
            print(f"  not used: {', '.join(left_out)} of the checkpoint; if you trust them, give --logger-kwargs")
        with Logger(config.get("logger_backend"), run, settings) as logger:
            upload_bundle(made, logger, acting.info["timesteps"])
