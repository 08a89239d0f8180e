"""`canter distill` and `canter dagger`: train a student of a trained teacher with TPPO.

`canter dagger` uses two processes, a collector and a trainer, which share only the student's run directory and the data
directory; either may be stopped, killed and started again.
"""

import dataclasses
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from gymnasium import spaces

from canter.algorithms import TPPOConfig
from canter.cli import runs
from canter.cli.errors import UserError, user_errors
from canter.cli.export import export
from canter.cli.flags import TeacherPath, at_least, parse
from canter.cli.options import RunOptions, check_run
from canter.cli.play import save_trajectories
from canter.cli.train import EVALS_PER_RUN, print_return, print_row, recorded_return, run_section, run_to_end
from canter.envs.spec import SpecEnv, named_parts
from canter.envs.wrap import env_options
from canter.runners.dagger_saver import COLLECTOR_FILE, CONFIG_NAMES, TRAINER_FILE, DaggerSaver
from canter.runners.heartbeat import Heartbeat
from canter.runners.run_log import StopTraining
from canter.storage.rollout_files.catalog import find_trajectory, trajectory_folders
from canter.utils.checkpoint import find_checkpoints, load_checkpoint, newest_valid_checkpoint
from canter.utils.files import make_folder, open_append

FADE = 0.2  # share of the run over which the teacher stops acting
STUDENT: dict[str, Any] = {"class_name": "TPPO", "teacher_act_prob": "linear", "schedule": "fixed"}
STUDENT |= {"learning_rate": 1e-3, "num_learning_epochs": 5, "num_mini_batches": 4}
# Imitation alone does not train the noise, and with much of it the student visits states that it never reaches without.
LOW_NOISE = {"init_noise_std": 0.05}
RECURRENT = {"class_name": "ActorCriticRecurrent", "rnn_type": "gru", "rnn_hidden_size": 64}
CONFIG_SECONDS = 600.0  # time that a process waits for the other one to begin
NOTE_SECONDS = 10.0  # between two notes about waiting


@dataclasses.dataclass(kw_only=True)
class StudentOptions:
    """A teacher, and settings of its student."""

    teacher: TeacherPath  # The teacher's run directory.
    policy: dict[str, Any] | None = None
    """Settings of the student's policy that differ from the teacher's, as YAML: {rnn_hidden_size: 128}."""
    algorithm: dict[str, Any] | None = None  # Settings of TPPO, as YAML: {distill_target: l1, learning_rate: 3e-4}.
    seed: int = 1  # Seed of weights, environments and sampling.
    modules: tuple[str, ...] = ()  # Modules that the teacher's settings name and that may be imported.
    device: str | None = None  # By default the CPU for `canter dagger`, a GPU if there is one for `canter distill`.


@dataclasses.dataclass(kw_only=True)
class DistillOptions(StudentOptions, RunOptions):
    """Train a student to imitate a trained teacher from a part of the teacher's observation."""

    segments: dict[str, Any] | None = None
    """Widths of the observation's parts, as YAML: {position: 8, velocity: 9}; the environment's by default."""
    hide: tuple[str, ...] = ()  # Parts that the student does not observe.
    using_ppo: bool = False  # Train on rewards too; without it this is DAgger.
    recurrent: bool = True  # Use a recurrent student.
    total_timesteps: int = 500_000  # Length of the run in environment steps.
    num_envs: int | None = None  # Environments stepped together; the teacher's number by default.
    num_steps_per_env: int = 128  # Steps of each environment between two updates.
    checkpoint: str | None = None  # The teacher's checkpoint: a file, or "best"; the newest valid one by default.
    bundle: bool = True  # Export the student's bundle at the end.


def distill(args: Sequence[str]) -> int:
    """Run `canter distill`."""
    options: DistillOptions = parse(DistillOptions, args, "canter distill")
    check_run(options)
    at_least(1, num_steps_per_env=options.num_steps_per_env)
    saved = runs.read_run(options.teacher, options.modules)
    checkpoint = saved.checkpoint(options.checkpoint)
    name = options.name or f"student-{time.strftime('%Y%m%d-%H%M%S')}"
    path = runs.new_run_directory(options.runs_dir, saved.task, name, options.seed)
    code = run_to_end(runs.new_runner(distill_config(options, saved, checkpoint), path, fits_evaluations=True), path)
    results = [directory / "evaluation.json" for directory in (saved.path, path)]
    if not code and all(result.is_file() for result in results):
        teacher, student = map(recorded_return, results)
        share = f", {student / teacher:.0%} of the teacher's" if teacher > 0 else ""
        print_row("teacher", f"{teacher:.1f}; student {student:.1f}{share}")
    if not code and options.bundle:
        try:
            export(path, modules=options.modules)
        except (UserError, ImportError) as error:  # the student is trained all the same
            print_row("bundle", f"none: {error}")
    return code


def distill_config(options: DistillOptions, saved: runs.SavedRun, checkpoint: Path) -> dict[str, Any]:
    """The content of the student's config.yaml."""
    num_envs = options.num_envs or int(saved.config["run"]["num_envs"])
    iterations = -(-options.total_timesteps // (options.num_steps_per_env * num_envs))
    known = {f.name for f in dataclasses.fields(TPPOConfig)}
    algorithm = {name: value for name, value in (saved.config.get("algorithm") or {}).items() if name in known}
    algorithm |= STUDENT | {"teacher_ac_path": str(checkpoint), "using_ppo": options.using_ppo}
    algorithm |= {"update_times_scale": max(1.0, FADE * iterations), "label_action_with_critic_obs": bool(options.hide)}
    env = described_env(saved, checkpoint)
    if not isinstance(env.action_space, spaces.Box):
        algorithm["distill_target"] = "max_log_prob"
    algorithm |= options.algorithm or {}
    policy = {name: value for name, value in (saved.config.get("policy") or {}).items() if name not in RECURRENT}
    policy |= RECURRENT if options.recurrent else {"class_name": "ActorCritic"}
    policy |= ({} if options.using_ppo else LOW_NOISE) | (options.policy or {})
    if options.recurrent:
        algorithm["num_mini_batches"] = min(int(algorithm["num_mini_batches"]), num_envs)
    run = run_section(options, saved.task, num_envs) | env_options(saved.config["run"])
    run["teacher"] = str(saved.path)
    if options.hide or options.segments:
        run["components"] = student_components(options, saved, env)
    config = {"algorithm": algorithm, "policy": policy, "num_steps_per_env": options.num_steps_per_env, "run": run}
    config |= {name: saved.config[name] for name in ("obs_groups", "clip_actions") if saved.config.get(name)}
    config |= {"eval_interval": max(1, iterations // EVALS_PER_RUN), "eval_episodes": 10}
    return config | {"seed": options.seed, "device": options.device}


def described_env(saved: runs.SavedRun, checkpoint: Path) -> Any:
    """The description of the teacher's environment in its checkpoint; the environment itself if there is none."""
    with user_errors(checkpoint):
        description = load_checkpoint(checkpoint, "cpu").get("environment")
    if description:
        return SpecEnv(description)
    return runs.open_env(saved.task, 1, "cpu", **env_options(saved.config["run"]))


def student_components(options: DistillOptions, saved: runs.SavedRun, env: Any) -> dict[str, Any]:
    """The arguments of `ObsComponents` for the student, checked against the environment of the teacher.

    The critic is shown what the teacher observes: its actions are the labels.
    """
    of_teacher = saved.config["run"].get("components") or {}
    segments = options.segments or of_teacher.get("segments") or named_parts(env, options.hide)
    if segments is None:
        raise UserError(f"{saved.task} does not name the parts of its observation; give --segments '{{a: 3, b: 2}}'")
    seen = list(
        of_teacher.get("actor") or [*segments, *(f"{name}_history" for name in of_teacher.get("history") or ())]
    )
    unknown = [name for name in options.hide if name not in seen]
    if unknown:
        raise UserError(f"the observation has no part {unknown[0]!r}; it has {', '.join(seen)}")
    actor = [name for name in seen if name not in options.hide]
    parts = {**of_teacher, "segments": {name: plain_shape(shape) for name, shape in segments.items()}, "actor": actor}
    has_own_critic = env.critic_obs_space is not env.obs_space
    return parts | ({"critic": seen, "own_critic": False} if options.hide and has_own_critic else {})


def plain_shape(shape: Any) -> Any:
    """A shape as YAML has it: a number, or a list of them."""
    sizes = [int(size) for size in shape] if isinstance(shape, Sequence) else int(shape)
    return sizes[0] if isinstance(sizes, list) and len(sizes) == 1 else sizes


@dataclasses.dataclass(kw_only=True)
class DaggerOptions(StudentOptions):
    """Train a student to imitate its teacher: collect in one process, train in another, or start both at once."""

    role: Literal["both", "collect", "train"] = "both"  # "both" trains and starts a collector as a second process.
    run: Path | None = None  # The student's run directory, <teacher>/dagger by default; an existing run is continued.
    data: Path | None = None  # Directory for the trajectories; <run>/data by default.
    task: str | None = None  # The student's task, if not the teacher's: the same with other observations, for example.
    iterations: int = 500  # Length of the training, in iterations of `num_steps_per_env` recorded steps of each stream.
    num_envs: int = 16  # Environments of the collector, and streams of recorded trajectories in the trainer.
    num_steps_per_env: int = 32  # Recorded steps of each stream between two updates.
    teacher_act_prob: Any = "exp"  # Probability that the teacher acts: a number, or its decay: exp, linear or tanh.
    update_times_scale: float = 50  # Iterations over which that probability decays.
    noise_std: float = 0.1
    """Standard deviation of the student's actions while collecting; 0 uses the policy's own, which is not trained."""
    critic_obs: bool = False  # The teacher observes the critic's observation.
    keep_latest: int = 0  # Number of newest trajectories to train on, and to wait for at the start; 0 trains on all.
    max_steps: float = 1e12  # Steps after which the collector stops.
    when_alone: Literal["go-on", "stop"] = "go-on"  # What a process does when it notices that the other one is gone.
    eval_episodes: int = 10  # Episodes of the evaluation at the end.


def dagger(args: Sequence[str]) -> int:
    """Run `canter dagger`."""
    options: DaggerOptions = parse(DaggerOptions, args, "canter dagger")
    at_least(1, **{name: getattr(options, name) for name in ("num_envs", "num_steps_per_env", "iterations")})
    teacher = runs.read_run(options.teacher, options.modules)
    run = options.run or teacher.path / "dagger"
    data = options.data or run / "data"
    for path, root in ((run, teacher.path), (data, run)):
        if path not in (options.run, options.data):  # a link there was not named by the user
            make_folder(path, root)
    if options.role == "collect":
        collect_labels(options, teacher, run, data)
    elif options.role == "train":
        train(options, teacher, run, data)
    else:
        with open_append(run / "collector.log") as log:
            command = [sys.executable, "-m", "canter.cli", "dagger", *args, "--role", "collect", "--when-alone", "stop"]
            collector = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                train(options, teacher, run, data, collector)
            finally:
                collector.terminate()  # it saves its buffer and ends
                collector.wait()
    return 0


def collect_labels(options: DaggerOptions, teacher: runs.SavedRun, run: Path, data: Path) -> None:
    """Run the newest student and label its steps with the teacher's actions."""
    for waited in waiting(f"a training in {run}"):
        if any((run / name).is_file() for name in CONFIG_NAMES):  # the trainer writes it first
            break
        if waited > CONFIG_SECONDS:
            seconds = f"{CONFIG_SECONDS:.0f} s"
            raise UserError(f"no training began in {run} within {seconds}; start `canter dagger --role train`")
    checkpoint = teacher.checkpoint(None)
    teacher.config["run"]["task"] = options.task or teacher.task
    runner = runs.load_policy(teacher, checkpoint, options.num_envs, options.seed, options.device)
    settings = {name: getattr(options, name) for name in ("teacher_act_prob", "update_times_scale")}
    settings |= {"training_policy_logdir": run, "action_sample_std": options.noise_std, "save_dir": data}
    settings |= {"min_timesteps": options.max_steps, "min_episodes": 1, "use_critic_obs": options.critic_obs}
    settings["stop_when_alone"] = options.when_alone == "stop"
    with user_errors():
        saver = DaggerSaver(runner.env, runner.policy, rollout_storage_length=options.num_steps_per_env, **settings)
    save_trajectories(saver, teacher, checkpoint, runner)


def train(options: DaggerOptions, teacher: runs.SavedRun, run: Path, data: Path, collector: Any = None) -> None:
    """Train on the trajectories and save every iteration; continues an existing run."""
    is_new = not (run / "config.yaml").is_file()
    config = dagger_config(options, teacher, run, data) if is_new else runs.read_run(run, options.modules).config
    if options.data is not None:
        config["pretrain_dataset"]["data_dir"] = data_path(data, run)
    data = run / config["pretrain_dataset"]["data_dir"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TPPO has no teacher")  # the collector has it
        runner = runs.open_runner(config, run, eval_episodes=options.eval_episodes)
    runs.take_logger_settings(runner)
    with user_errors():
        if find_checkpoints(run):
            runner.load(newest_valid_checkpoint(run))
        runner.init_writer()
    runs.limit_threads(runner, None)
    own, partner = run / TRAINER_FILE, data / COLLECTOR_FILE
    with Heartbeat(own, partner, "collector", options.when_alone == "stop") as heartbeat:
        for waited in waiting(f"{options.num_envs} trajectories in {data}"):
            folders = trajectory_folders(data) if data.is_dir() else []
            if sum(find_trajectory(folder)[0] is not None for _, folder in folders) >= options.num_envs:
                break  # one for every stream
            if collector is not None and collector.poll() is not None:
                raise UserError(f"the collector has ended; {run}/collector.log has its output")
            if heartbeat.is_over() or (waited > CONFIG_SECONDS and not heartbeat.has_partner()):
                raise UserError(f"no collector writes to {data}; start `canter dagger --role collect`")
        runner.add_callback("pre_iteration", lambda runner: stop_if_over(heartbeat))
        runner.learn(max(0, options.iterations - runner.iteration))
    if options.eval_episodes:
        print_return(runner.eval(options.eval_episodes), "without noise")
    print_row("run", run)
    print_row("data", data)
    runner.close()


def waiting(what: str) -> Iterator[float]:
    """Yield the seconds waited, ten times a second, with a note every ten seconds."""
    begin, next_note = time.monotonic(), NOTE_SECONDS
    while True:
        waited = time.monotonic() - begin
        if waited >= next_note:
            print(f"waiting for {what}: {waited:.0f} s", flush=True)
            next_note += NOTE_SECONDS
        yield waited
        time.sleep(0.1)


def stop_if_over(heartbeat: Heartbeat) -> None:
    """End the training if it is to stop without its partner."""
    if heartbeat.is_over():
        raise StopTraining


def data_path(data: Path, run: Path) -> str:
    """The data directory as config.yaml holds it: relative to the run if it is inside, so that both can be moved."""
    data, run = data.absolute(), run.absolute()
    return str(data.relative_to(run) if data.is_relative_to(run) else data)


def dagger_config(options: DaggerOptions, teacher: runs.SavedRun, run: Path, data: Path) -> dict[str, Any]:
    """The configuration of a run that only imitates, from a dataset that grows during the training."""
    task = options.task or teacher.task
    env = runs.open_env(task, 1, "cpu")
    distance = "mse_sum" if isinstance(env.action_space, spaces.Box) else "max_log_prob"
    env.close()
    is_normalized = bool((teacher.config.get("algorithm") or {}).get("empirical_normalization", False))
    algorithm = {"class_name": "TPPO", "using_ppo": False, "distill_target": distance, "learning_rate": 1e-3}
    algorithm |= {"num_learning_epochs": 2, "num_mini_batches": 4, "schedule": "fixed"}
    algorithm["empirical_normalization"] = is_normalized
    dataset = {
        "data_dir": data_path(data, run),
        "dataset_loops": -1,
        "random_shuffle_traj_order": True,
        "seed": options.seed,
    }
    dataset |= {"keep_latest_n_trajs": options.keep_latest, "wait_interval_s": 0.2}
    length = options.iterations * options.num_envs * options.num_steps_per_env
    config = {"algorithm": algorithm | (options.algorithm or {}), "num_steps_per_env": options.num_steps_per_env}
    config |= {"policy": (teacher.config.get("policy") or {}) | (options.policy or {}), "pretrain_dataset": dataset}
    config |= {"log_interval": 1, "save_interval": 1, "pretrain_iterations": -1, "device": options.device or "cpu"}
    info = {"task": task, "num_envs": options.num_envs, "runner": "TwoStageRunner", "total_timesteps": length}
    return config | {"seed": options.seed, "run": info}
