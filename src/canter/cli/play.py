"""`canter eval`, `canter play` and `canter collect`: measure, show and record a trained policy."""

import dataclasses
import json
import math
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import gymnasium
import torch
import tyro

from canter.cli.episodes import EpisodeLog, one_command
from canter.cli.errors import INTERRUPTED, UserError, user_errors
from canter.cli.flags import RunPath, at_least
from canter.cli.runs import EVAL_ENVS, SavedRun, load_policy, open_env, read_run
from canter.envs.vec_env import VecEnv
from canter.envs.wrap import env_options
from canter.export.runtime import Policy
from canter.export.scene import MujocoScene
from canter.export.simulation import Disturbance, make_task, simulate
from canter.runners import Runner
from canter.runners.demonstration import DemonstrationSaver
from canter.runners.evaluation import run_episodes
from canter.utils.checkpoint import find_checkpoints
from canter.utils.files import atomic_write, make_folder
from canter.utils.films import Film, FilmError

FPS = 30
MAX_FRAMES = 3000
PROGRESS_S = 5.0  # between two lines about a film that is being made
UNITS = {
    "error_x": (1, "m/s"),
    "error_y": (1, "m/s"),
    "error_yaw": (1, "rad/s"),
    "mean_velocity": (1, "m/s"),
    "step_median": (1e3, "ms"),
    "step_p99": (1e3, "ms"),
}
LABELS = ("checkpoint", "command")  # what an evaluation is of
ARROWS = {"\x1b[A": 265, "\x1b[B": 264, "\x1b[C": 262, "\x1b[D": 263}  # of a terminal -> of MuJoCo's window


@dataclasses.dataclass
class PolicyOptions:
    """The policy of a run, and how it is run."""

    run: RunPath  # The run directory, or a checkpoint in it.
    checkpoint: str | None = None  # A file, or "best"; the newest valid checkpoint by default.
    seed: int | None = 0  # Seed of the episodes; None draws one.
    device: str | None = None  # Device to compute on; the CPU by default.
    modules: tuple[str, ...] = ()  # Modules that the run's settings name and that may be imported.
    config: Path | None = None
    """Training dict of a checkpoint without one, of another library; by default params/agent.yaml of its run."""
    task: str | None = None  # Task by name, instead of the one that the run or the bundle names.

    def load(self, num_envs: int) -> tuple[SavedRun, Path, Runner]:
        """The run, its checkpoint, and a runner with the trained policy."""
        saved = read_run(self.run, self.modules, self.config, self.task)
        checkpoint = saved.checkpoint(self.checkpoint)
        return saved, checkpoint, load_policy(saved, checkpoint, num_envs, self.seed, self.device)


@dataclasses.dataclass
class CollectOptions:
    """The trajectories to collect."""

    out: Path | None = None  # Directory for the trajectories; <run>/demonstrations by default.
    steps: int | None = None  # Collect at least this many steps; by default 100000, or with --episodes none.
    episodes: int | None = None  # Collect at least this many episodes; by default 1.
    num_envs: int = 8  # Environments stepped together.
    sample: bool = False  # Act with exploration noise.
    success_only: bool = False  # Keep only episodes that ended by a time limit or with success.
    critic_obs: bool = False  # The policy observes the critic's observation.
    images: dict[str, Any] | None = None
    """Parts of the observation to store as bytes, as YAML: {camera: normalized_image}."""
    file_steps: int = 64  # Most steps in one file.


@dataclasses.dataclass
class BundleOptions:
    """How a bundle is simulated."""

    mujoco: Path | None = None  # Run in this MuJoCo scene.
    command: tuple[float, ...] = ()  # Commanded velocities of a scene in m/s, m/s and rad/s; arrow keys change them.
    keys: bool = False  # Run a scene in real time with arrow keys, comma, dot and space from the terminal; q ends it.
    terms: dict[str, Any] | None = None
    """Quantities of the scene for parts of the observation, as YAML: {base_vel: sensor_name}."""
    period: float | None = None  # Control period in seconds, where the bundle does not state it.
    reset_noise: float = 0.01  # Largest random difference from the default pose at the start, in m and rad.
    disturbance: Annotated[Disturbance, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Disturbance)
    report: Path | None = None  # Write the report as JSON.


TrainedPolicy = Annotated[PolicyOptions, tyro.conf.arg(name="")]
Simulation = Annotated[BundleOptions, tyro.conf.arg(name="")]
Collection = Annotated[CollectOptions, tyro.conf.arg(name="")]
AsJson = Annotated[bool, tyro.conf.arg(name="json")]


def evaluate(
    run: TrainedPolicy,
    episodes: int = 20,
    commands: tuple[str, ...] = (),
    every_checkpoint: bool = False,
    as_json: AsJson = False,
) -> int:
    """Run episodes without exploration noise and print their returns, and what the simulator logs of them.

    Args:
        run: The run and its policy.
        episodes: Number of episodes, for each command and checkpoint.
        commands: Velocity commands of mjlab or Isaac Lab, each as forward,sideways,turning; drawn at random by default.
        every_checkpoint: Evaluate every model_<number>.pt of the run, side by side.
        as_json: Print JSON.
    """
    saved, checkpoint, runner = run.load(max(1, min(EVAL_ENVS, episodes)))
    files = [file for _, file in find_checkpoints(saved.path)] if every_checkpoint else [checkpoint]
    if not files:
        raise UserError(f"there is no model_<number>.pt in {saved.path}; leave --every-checkpoint out")
    runner.env = log = EpisodeLog(runner.env)
    rows: list[dict[str, Any]] = []
    with user_errors():
        for file in files:
            if every_checkpoint:
                runner.load(file, load_optimizer=False)
            for command in commands or (None,):
                log.sums, log.episodes = {}, {}
                numbers = None if command is None else [float(part) for part in command.split(",")]
                with nullcontext() if numbers is None else one_command(runner.env, numbers):
                    result = runner.eval(episodes) | log.summary()
                label = {"checkpoint": file.name} if every_checkpoint else {}
                label |= {} if numbers is None else {"command": numbers}
                rows.append({**label, **result, "episodes": episodes, "step": runner.tot_timesteps})
    runner.close()
    if as_json:
        print(json.dumps(rows[0] if len(rows) == 1 else rows))
        return 0
    print(f"  {saved.task}, {checkpoint}, {episodes} episode{'s' * (episodes > 1)} without noise")
    show_rows(rows)
    return 0


def show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print evaluations side by side: what they are of, then every number."""
    names = [name for name in rows[0] if name not in (*LABELS, "episodes", "step")]
    texts = {name: name.removeprefix("eval/").replace("_", " ") if name.startswith("eval/") else name for name in names}
    is_plain = len(rows) == 1 and all(name.startswith("eval/") for name in names)
    first, width = (14, 10) if is_plain else (max(map(len, texts.values())) + 2, 14)
    for name in LABELS if len(rows) > 1 else ():
        if any(name in row for row in rows):
            cells = (str(row.get(name, "")).removesuffix(".pt").replace(" ", "") for row in rows)
            print(f"  {name:<{first}}" + "".join(f"{cell:>{width}}" for cell in cells))
    for name in names:
        places = 2 if name.startswith("eval/") else 4
        print(f"  {texts[name]:<{first}}" + "".join(f"{row.get(name, math.nan):{width}.{places}f}" for row in rows))


def play(
    run: TrainedPolicy,
    bundle: Simulation,
    video: Path | None = None,
    episodes: int = 1,
    seconds: float = math.inf,
) -> int:
    """Show a policy without exploration noise, in a window or, without a screen, in a video file.

    A bundle of `canter export` runs in ONNX Runtime, in its task or in a MuJoCo scene, and a report is printed.

    Args:
        run: The run or the bundle, and its policy.
        bundle: The simulation of a bundle.
        video: Write this .mp4 or .gif instead of opening a window; <run>/play.mp4 without a screen.
        episodes: Number of episodes.
        seconds: End a video that takes longer than this to render; in a scene, the length of an episode.
    """
    at_least(1, episodes=episodes)
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    is_headless = sys.platform.startswith("linux") and not any(os.environ.get(name) for name in screens)
    if is_headless:  # SDL and MuJoCo render off-screen, unless the user set other drivers
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("MUJOCO_GL", "egl")
    if (run.run / "policy.json").is_file():
        return play_bundle(run, bundle, video, episodes, seconds, has_window=not is_headless and video is None)
    if bundle != BundleOptions():
        raise UserError(f"{run.run} is no bundle, and the options of simulations are for bundles; canter export RUN")
    saved, _, runner = run.load(1)
    if video is None and (is_headless or saved.task.startswith("canter/")):
        video = saved.path / "play.mp4"
    # Gymnasium renders in more places than EnvPool, and has many tasks of the same names.
    twin = saved.task.removeprefix("envpool/")
    task = twin if twin in gymnasium.registry else saved.task
    render_mode, options = "human" if video is None else "rgb_array", env_options(saved.config["run"])
    env = open_env(task, 1, run.device or "cpu", run.seed, render_mode, **options)
    policy = runner.get_inference_policy()
    try:
        if video is None:  # the environment renders to its window as it is stepped
            returns = run_episodes(policy, env, episodes).returns
        else:
            made = new_film(env, video, episodes)
            returns = []
            with made, suppress(KeyboardInterrupt):  # Ctrl-C ends the film, not the command
                returns = film(policy, env, made, episodes, seconds)
            if not made.num_frames:
                return INTERRUPTED
            print(f"  video       {video} ({film_length(made, len(returns) < episodes, seconds)})")
    except FilmError:
        raise
    except (RuntimeError, OSError, AttributeError, gymnasium.error.Error) as error:
        raise UserError(f"{task} could not be rendered: {error}") from error
    finally:
        env.close()
        runner.close()
    if returns:
        print("  return      " + ", ".join(f"{value:.1f}" for value in returns))
    return 0


def play_bundle(
    run: PolicyOptions, options: BundleOptions, video: Path | None, episodes: int, seconds: float, has_window: bool
) -> int:
    """Run episodes of a bundle, print a report, and write a film if one is asked for."""
    check_keys(options)
    with user_errors():
        policy = Policy(run.run)
        if options.mujoco is not None:
            length = 20.0 if math.isinf(seconds) else seconds
            task: Any = MujocoScene(
                options.mujoco,
                policy,
                run.seed,
                options.command,
                options.terms,
                options.reset_noise,
                length,
                options.period,
            )
            for note in task.notes():
                print(f"  {note}", file=sys.stderr)
        else:
            render_mode = None if video is None and not has_window else "human" if video is None else "rgb_array"
            task = make_task(policy, run.task, run.seed, render_mode)
        made = None if video is None else ShownFilm(video, task.fps, MAX_FRAMES)
        watch = [] if made is None else [film_step(made)]
        if has_window and options.mujoco is not None:
            watch.append(open_window(task))
        with ExitStack() as stack:
            if made is not None:
                stack.enter_context(made)
            stack.callback(task.close)
            if options.keys:
                watch.append(stack.enter_context(terminal_keys(task, is_paced=bool(watch) and video is None)))
            on_step = partial(call_each, watch)
            result = simulate(policy, task, episodes, options.disturbance, run.seed, on_step)
    summary = result.summary()
    if options.report is not None:
        atomic_write(options.report, f"{json.dumps(summary, indent=2)}\n".encode())
    for name, value in summary.items():
        if value is not None and not isinstance(value, list):
            scale, unit = UNITS.get(name, (1, ""))
            print(f"  {name.replace('_', ' '):<16}{scale * value:12.4g} {unit}".rstrip())
    return 0


class ShownFilm(Film):
    """A film that prints its progress every few seconds; some simulators render only four frames in one."""

    def __init__(self, path: Path, fps: float, most_frames: int) -> None:
        super().__init__(path, fps)
        self.most_frames = most_frames
        self.began = self.shown = time.monotonic()

    def add(self, frame: Any) -> None:
        """Encode one frame."""
        super().add(frame)
        now = time.monotonic()
        if now - self.shown >= PROGRESS_S:
            rate = self.num_frames / (now - self.began)
            hint = "" if self.shown > self.began else "  (Ctrl-C ends the film here)"
            self.shown = now
            print(f"  frame {self.num_frames} of at most {self.most_frames}  {rate:.1f} frames/s{hint}", flush=True)


def new_film(env: Any, path: Path, episodes: int) -> ShownFilm:
    """A film of some episodes of an environment, as fast as its simulation."""
    metadata = getattr(getattr(env, "envs", [env])[0], "metadata", None) or {}
    length = episodes * (getattr(env, "max_episode_length", None) or MAX_FRAMES)
    with user_errors():
        return ShownFilm(path, metadata.get("render_fps") or FPS, min(MAX_FRAMES, length))


def film_length(made: ShownFilm, is_cut: bool, seconds: float) -> str:
    """How many frames a film has, and why it has no more."""
    if not is_cut:
        return f"{made.num_frames} frames"
    if made.num_frames >= MAX_FRAMES:
        return f"{made.num_frames} frames, the most of a film"
    reason = "it was interrupted"
    if time.monotonic() - made.began >= seconds:
        reason = f"rendering took more than {seconds:g} s; canter play without --seconds films the rest"
    return f"{made.num_frames} of at most {made.most_frames} frames: {reason}"


def call_each(functions: Sequence[Callable[[Any], bool]], task: Any) -> bool:
    """Call every function of a step; whether one of them ends the simulation."""
    return True in [function(task) for function in functions]


def film_step(film: Film) -> Any:
    """A function that adds a picture to a film after every step."""

    def add(task: Any) -> bool:
        picture = task.render()
        if picture is None:
            raise ValueError("the simulation gives no pictures")
        film.add(picture)
        return film.num_frames >= MAX_FRAMES

    return add


def open_window(scene: MujocoScene) -> Any:
    """Show a scene in MuJoCo's window, in real time, with commands from the keyboard; gives the function of a step."""
    from mujoco import viewer

    window, wait = viewer.launch_passive(scene.model, scene.data, key_callback=scene.press), real_time()

    def show(task: MujocoScene) -> bool:
        window.sync()
        wait(task.period)
        return not window.is_running()

    return show


def real_time() -> Callable[[float], None]:
    """A function that sleeps until the control period since its last call is over."""
    due = time.monotonic()

    def wait(period: float) -> None:
        nonlocal due
        due = max(due + period, time.monotonic() - period)
        time.sleep(max(0.0, due - time.monotonic()))

    return wait


def check_keys(options: BundleOptions) -> None:
    """Refuse keys without a scene, and without anything that they could come from."""
    if options.keys and options.mujoco is None:
        raise UserError("--keys drives a scene; name it: --mujoco scene.xml")
    if options.keys and not (sys.stdin.isatty() or is_pipe(sys.stdin.fileno())):
        way_out = "start it in one (ssh -t, docker run -it), or send keys through a pipe"
        raise UserError(f"--keys reads keys from a terminal, and standard input is none; {way_out}")


def is_pipe(file: int) -> bool:
    """Whether keys may come from another program."""
    kind = os.fstat(file).st_mode
    return stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)


@contextmanager
def terminal_keys(scene: MujocoScene, is_paced: bool) -> Iterator[Callable[[Any], bool]]:
    """Change a scene's command by keys of a terminal or a pipe; gives the function of a step.

    It waits unless `is_paced`, and ends the simulation at a `q` or when nothing more can come.
    """
    try:
        import termios
        import tty
    except ImportError as error:  # Windows
        raise UserError("--keys needs a Unix terminal; the keys of MuJoCo's window work everywhere") from error
    terminal, wait = sys.stdin.fileno(), real_time()
    before = termios.tcgetattr(terminal) if sys.stdin.isatty() else None

    def read(task: MujocoScene) -> bool:
        is_over = False
        while select.select([terminal], [], [], 0)[0] and not is_over:
            pressed = os.read(terminal, 1024).decode(errors="ignore")
            is_over = not pressed or "q" in pressed  # nothing is read from a terminal that was closed
            for arrow, key in ARROWS.items():
                pressed = pressed.replace(arrow, chr(key))
            for key in pressed:
                task.press(ord(key))
            print("  command     " + ", ".join(f"{value:.1f}" for value in task.command), flush=True)
        if not is_paced:
            wait(task.period)
        return is_over

    if before is None:
        yield read
        return
    tty.setcbreak(terminal)
    try:
        yield read
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def collect(run: TrainedPolicy, options: Collection) -> int:
    """Run a trained policy and save every trajectory; adds to the trajectories of an existing directory."""
    at_least(0, steps=options.steps, episodes=options.episodes)
    at_least(1, num_envs=options.num_envs, file_steps=options.file_steps)
    saved, checkpoint, runner = run.load(options.num_envs)
    if options.out is None:
        make_folder(saved.path / "demonstrations", saved.path)
    steps = (100_000 if options.episodes is None else 0) if options.steps is None else options.steps
    episodes = 1 if options.episodes is None else options.episodes
    block = options.file_steps * options.num_envs
    if steps % block:
        whole = f"whole files of {options.file_steps} steps of {options.num_envs} environments"
        print(f"  collecting at least {-(-steps // block) * block} steps for {steps}: {whole}")
    settings: dict[str, Any] = {"rollout_storage_length": options.file_steps, "min_timesteps": steps}
    settings |= {"min_episodes": episodes, "success_traj_only": options.success_only}
    settings |= {"use_critic_obs": options.critic_obs, "obs_disassemble_mapping": options.images}
    settings |= {"demo_by_sample": options.sample, "save_dir": options.out or saved.path / "demonstrations"}
    with user_errors():
        saver = DemonstrationSaver(runner.env, runner.policy, **settings)
    return save_trajectories(saver, saved, checkpoint, runner)
    return 0


def save_trajectories(saver: DemonstrationSaver, saved: SavedRun, checkpoint: Path, runner: Runner) -> int:
    """Collect, print the totals, and close the environments; returns the exit code."""
    saver.metadata |= {"env": saved.task, "checkpoint": checkpoint.name}
    try:
        with saver:
            saver.collect_and_save(saved.config)
    finally:
        runner.close()
    print(f"  {saver.total_timesteps} steps, {saver.total_episodes} episodes  {saver.save_dir}")
    if saver.stopped_by is None:
        return 0
    print("stopped, all steps are saved; the same command adds more", file=sys.stderr)
    return 128 + saver.stopped_by


@torch.inference_mode()
def film(policy: Any, env: VecEnv, out: Film, num_episodes: int = 1, seconds: float = math.inf) -> list[float]:
    """Film episodes of the first environment and return their returns; stops early after `seconds` or 3000 frames."""
    returns, total, deadline = [], 0.0, time.monotonic() + seconds
    policy.reset()
    obs, _ = env.reset()
    while not out.num_frames or (
        len(returns) < num_episodes and out.num_frames < MAX_FRAMES and time.monotonic() < deadline
    ):
        picture = env.render()
        if picture is None:
            raise RuntimeError("the environment gives no pictures")
        out.add(picture)
        step = env.step(policy(obs))
        obs = step.obs
        policy.reset(step.done | ~step.valid)
        total += float(step.reward[0]) if step.valid[0] else 0.0
        if step.done[0]:
            returns.append(total)
            total = 0.0
    return returns
