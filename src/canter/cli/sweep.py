"""`canter sweep`: search the settings of a task with Optuna, in any number of processes, or with Ray Tune."""

import dataclasses
import math
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from canter.cli import runs
from canter.cli.errors import NUMERIC, UserError, user_errors
from canter.cli.flags import TaskName, at_least, parse
from canter.cli.live_table import LiveTable
from canter.cli.options import TrainOptions, parse_train
from canter.cli.run_process import POLL_S, RunPool, TrainingRun
from canter.cli.search_space import Space, grid, parse_space, starting_point, suggest, to_flags
from canter.cli.sweep_report import write_results
from canter.utils.config import unknown_name
from canter.utils.run_data import load_run, short
from canter.utils.runtime import StopSignal, usable_cores

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

REPORTS_PER_RUN = 20
SYNC_S = 2.0  # between two looks at the trials of other processes
MAX_ATTEMPTS = 3  # of a trial whose process was killed, which may be the fault of its settings
WAIT_S = 60  # for SQLite, while other processes write
EXHAUSTIVE = ("grid", "bruteforce")  # samplers that try every combination
MAX_FAILURES = 3  # in a row, before the first success


@dataclasses.dataclass(kw_only=True)
class SweepOptions:
    """Search the settings of a task; every process with the same flags, on any machine, joins the same study.

    All flags of `canter train` are flags here too: they apply to every trial.
    """

    task: TaskName
    """A Gymnasium id, canter/<name>, envpool/<id> or a registered name; `canter tasks` lists them."""
    space: tuple[str, ...] = ()
    """Settings to search: learning_rate=log:1e-4..1e-2 entropy_coef=0..0.02 num_mini_batches=2,4,8, or YAML files."""
    trials: int = 20  # Trials of the study, of all processes together.
    seeds: int = 1  # Runs of a trial, with consecutive seeds; their mean counts.
    jobs: int | None = None  # Runs at a time in this process; by default the number of cores.
    study: str = "sweep"  # Name of the study.
    storage: str | None = None
    """SQLite file or database URL of the study; by default <runs-dir>/<task>/<study>/study.db."""
    objective: str = "eval/mean_reward"
    """Metric to optimise, at the end of a run; of the final evaluation if it is one."""
    direction: Literal["maximize", "minimize"] = "maximize"  # Whether a high objective is good.
    sampler: str = "tpe"  # Optuna sampler: tpe, random, grid, gp, cmaes, qmc, nsgaii, bruteforce.
    sampler_args: dict[str, Any] = dataclasses.field(default_factory=dict)  # Arguments of the sampler, as YAML.
    pruner: str = "median"  # Optuna pruner: median, percentile, successivehalving, hyperband, patient, nop (none).
    pruner_args: dict[str, Any] = dataclasses.field(default_factory=dict)  # Arguments of the pruner, as YAML.
    stale_after: int = 60  # Seconds without a sign of life after which another process tries a trial again.
    engine: Literal["optuna", "ray"] = "optuna"  # What runs the trials: processes that share a storage, or Ray Tune.
    address: str | None = None  # Address of a Ray cluster; by default Ray is started on this machine.


@dataclasses.dataclass
class Plan:
    """A sweep: its options, the flags of every run, the space, and where files go."""

    options: SweepOptions
    train: TrainOptions[Any, Any]
    flags: list[str]  # of every run, for `canter train`
    space: Space
    folder: Path
    args: list[str]  # the words after `canter sweep`

    def new_runs(self, name: str, settings: Mapping[str, Any]) -> list[TrainingRun]:
        """The runs of a trial, one for each seed, not started yet."""
        task, first = self.options.task, self.train.settings.seed
        found: list[TrainingRun] = []
        for seed in range(first, first + self.options.seeds):
            path = runs.new_run_directory(self.train.runs_dir, task, name, seed)
            own = ["--name", name, "--seed", str(seed), "--runs-dir", str(self.train.runs_dir), "--no-video"]
            found.append(TrainingRun(path, ["train", task, *self.flags, *own, *to_flags(settings)]))
        return found

    def reports(self, running: Sequence[TrainingRun]) -> list[tuple[int, float]]:
        """Steps and means over the seeds of the objective so far, a few for each run."""
        gap = self.train.total_timesteps / REPORTS_PER_RUN
        curves = [thinned(run.values(self.options.objective), gap) for run in running]
        return [(points[0][0], statistics.fmean(value for _, value in points)) for points in zip(*curves, strict=False)]

    def score(self, run: TrainingRun) -> float:
        """The objective of a run that has ended; LookupError if it has none."""
        value = load_run(run.path).final_score(self.options.objective)
        if value is None:
            known = sorted({tag for row in run.rows for tag in row} - {"step", "time"})
            problem = f"{run.path.name} ended without the metric {self.options.objective!r}"
            raise LookupError(f"{problem}; it has {', '.join(known) or 'none'}")
        return value


def thinned(points: Sequence[tuple[int, float]], gap: float) -> list[tuple[int, float]]:
    """The finite points that are at least `gap` steps apart."""
    kept: list[tuple[int, float]] = []
    for step, value in points:
        if math.isfinite(value) and (not kept or step - kept[-1][0] >= 0.99 * gap):
            kept.append((step, value))
    return kept


def sweep(args: Sequence[str]) -> int:
    """Run `canter sweep`."""
    if not args:
        raise UserError(
            "name the task and the settings to search: canter sweep TASK --space learning_rate=log:1e-4..1e-2"
        )
    with user_errors():
        plan = parse_sweep(args)
    if plan.options.engine == "ray":
        from canter.cli.sweep_ray import run_ray

        study = run_ray(plan)
    else:
        with user_errors():
            study = open_study(plan)
        if stopped := Worker(plan, study).run():
            print(f"stopped; the same command continues the study in {plan.folder}")
            return 128 + stopped
    write_results(plan, study)
    return 0


def parse_sweep(args: Sequence[str]) -> Plan:
    """The sweep that the words after `canter sweep` describe."""
    options, rest = parse(SweepOptions, args, "canter sweep", return_unknown_args=True)
    at_least(1, trials=options.trials, seeds=options.seeds, jobs=options.jobs, stale_after=options.stale_after)
    train, _ = parse_train([options.task, *rest])
    if train.seeds or train.name:
        raise UserError("a sweep names its runs and counts its seeds: use --study NAME, --seeds N and --seed FIRST")
    space = parse_space(options.space, train)
    first = {name: entry.ends[0] for name, entry in space.items()}
    for settings in [first, *({**first, name: value} for name, entry in space.items() for value in entry.ends[1:])]:
        parse_train([options.task, *rest, *to_flags(settings)])  # refuses values before the first trial
    folder = train.runs_dir.joinpath(*map(runs.safe_name, options.task.split("/")), runs.safe_name(options.study))
    if options.sampler in EXHAUSTIVE:
        options.trials = min(options.trials, math.prod(map(len, grid(space).values())))
    return Plan(options, train, list(rest), space, folder, list(args))


def open_study(plan: Plan) -> "optuna.Study":
    """The study of a sweep, new or begun by another process with the same flags."""
    optuna, options = import_optuna(), plan.options
    # All runs look alike at first.
    warm_up = {"n_warmup_steps": plan.train.total_timesteps // 3} if options.pruner in ("median", "percentile") else {}
    common: dict[str, Any] = {
        "study_name": f"{options.task}/{options.study}",
        "storage": open_storage(plan),
        "sampler": optuna_object(optuna.samplers, "Sampler", options.sampler, sampler_args(plan)),
        "pruner": optuna_object(optuna.pruners, "Pruner", options.pruner, warm_up | options.pruner_args),
    }
    about = {"space": {name: str(entry) for name, entry in plan.space.items()}, "flags": " ".join(plan.flags)}
    about |= {"seeds": options.seeds, "objective": options.objective, "direction": options.direction}
    try:
        study = optuna.create_study(direction=options.direction, **common)
    except optuna.exceptions.DuplicatedStudyError:
        study = optuna.load_study(**common)
        for name, value in about.items():
            if (there := study.user_attrs.get(name, value)) != value:
                other = f"the study {options.study!r} was begun with {name} {there!r}, not {value!r}"
                raise UserError(f"{other}; give the same flags, or another --study") from None
        return study
    if left := sorted(plan.folder.parent.glob(f"{runs.safe_name(options.study)}-trial*")):
        optuna.delete_study(study_name=common["study_name"], storage=common["storage"])
        raise UserError(f"{left[0]} is of another study with this name; choose another --study")
    for name, value in about.items():
        study.set_user_attr(name, value)
    start = None if options.sampler in EXHAUSTIVE else starting_point(plan.space, plan.train)
    if start is not None:
        study.enqueue_trial(start)  # so that the search never ends below the settings that it began with
    return study


def import_optuna() -> Any:
    """The package optuna, without its messages about every trial."""
    try:
        import optuna
    except ImportError as error:
        raise UserError('a sweep needs a package that is not installed: pip install "canter[optuna]"') from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def sampler_args(plan: Plan) -> dict[str, Any]:
    """The arguments of the sampler; a grid needs the values to try."""
    grid_args = {"search_space": grid(plan.space)} if plan.options.sampler == "grid" else {}
    return grid_args | plan.options.sampler_args


def open_storage(plan: Plan) -> Any:
    """The database that `--storage` names, in which Optuna notices trials whose process gives no sign of life."""
    from optuna.exceptions import ExperimentalWarning
    from optuna.storages import RDBStorage

    place, patience = plan.options.storage or str(plan.folder / "study.db"), plan.options.stale_after
    url = place if "://" in place else f"sqlite:///{place}"
    if "://" not in place:
        Path(place).parent.mkdir(parents=True, exist_ok=True)
    engine = {"connect_args": {"timeout": WAIT_S}} if url.startswith("sqlite") else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        signs: dict[str, Any] = {"heartbeat_interval": max(1, patience // 6), "grace_period": patience}
        signs["heartbeat_stale_trial_callback"] = try_again
        try:
            return RDBStorage(url, engine, **signs)
        except Exception as error:  # every database and driver has errors of its own; the address may have a password
            kind, reason = url.partition("://")[0], " ".join(str(error).split())
            raise UserError(f"the --storage {kind}://... cannot be opened: {reason or type(error).__name__}") from error


def try_again(study: "optuna.Study", trial: "FrozenTrial", attempt: int = 1) -> bool:
    """Queue the settings of a failed trial again, unless its process was killed too often; whether they are queued."""
    attempts = trial.user_attrs.get("attempts", 0) + attempt
    if attempts < MAX_ATTEMPTS:
        study.enqueue_trial(trial.params, user_attrs={"retry_of": trial.number, "attempts": attempts})
    return attempts < MAX_ATTEMPTS


def optuna_object(module: Any, kind: str, name: str, args: Mapping[str, Any]) -> Any:
    """The sampler or pruner of Optuna with a short name, such as tpe for TPESampler."""
    classes = [cls for cls in dir(module) if cls.endswith(kind) and not cls.startswith("Base")]
    known = {cls.removesuffix(kind).lower(): getattr(module, cls) for cls in classes}
    wanted = name.lower().replace("-", "").replace("_", "").removesuffix(kind.lower())
    if wanted not in known:
        raise ValueError(unknown_name(kind.lower(), name, known, "Optuna"))
    return known[wanted](**args)


@dataclasses.dataclass(eq=False)
class ActiveTrial:
    """A trial that this process runs."""

    trial: "optuna.Trial"
    runs: list[TrainingRun]
    reported: int = 0


def counting(trials: Sequence["FrozenTrial"]) -> list["FrozenTrial"]:
    """The trials that count towards the length of a study: not surplus ones, nor those tried again."""
    again = {trial.user_attrs.get("retry_of") for trial in trials}
    failed = [t for t in trials if t.state.name == "FAIL" and (t.number in again or "surplus" in t.user_attrs)]
    return [trial for trial in trials if trial not in failed]


class Worker:
    """Runs trials of a study in this process until the study is complete, beside any number of other processes."""

    def __init__(self, plan: Plan, study: "optuna.Study") -> None:
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        self.plan, self.study, self.states = plan, study, TrialState
        self.lost = UpdateFinishedTrialError  # raised by a write to a trial that another process has ended
        self.mine: list[ActiveTrial] = []
        self.synced = -math.inf
        self.failures = 0

    def run(self) -> int | None:
        """Work until the study is complete; returns the signal that stopped it before."""
        jobs = self.plan.options.jobs or usable_cores()
        with (
            StopSignal() as stop,
            RunPool(jobs, self.plan.train.settings.device) as self.pool,
            LiveTable() as self.table,
        ):
            try:
                while stop.requested is None and not self.step():
                    time.sleep(POLL_S)
            finally:
                self.pool.stop(*(run for active in self.mine for run in active.runs))
                for active in list(self.mine):  # of an interrupted process: another one tries them again
                    self.retry(active, attempt=0)
        return stop.requested

    def step(self) -> bool:
        """Look after this process's trials and those of others; returns whether the study is complete."""
        self.pool.poll()
        for active in list(self.mine):
            self.settle(active)
        now = time.monotonic()
        if now - self.synced < SYNC_S:
            return False
        self.synced = now
        self.exchange_signs()
        while self.pool.has_room() and self.start_trial():
            pass
        trials = self.study.get_trials(deepcopy=False)
        self.table.show(*self.progress(trials))
        open_states = (self.states.RUNNING, self.states.WAITING)
        is_open = any(trial.state in open_states for trial in trials)
        return not is_open and len(counting(trials)) >= self.plan.options.trials

    def start_trial(self) -> bool:
        """Ask for a trial and start its runs, if the study is not long enough yet."""
        trials, wanted = self.study.get_trials(deepcopy=False), self.plan.options.trials
        if len(counting(trials)) >= wanted and not any(t.state == self.states.WAITING for t in trials):
            return False
        trial = self.study.ask()
        settings = suggest(trial, self.plan.space)
        numbers = [other.number for other in counting(self.study.get_trials(deepcopy=False))]
        if trial.number not in sorted(numbers)[:wanted]:  # several processes asked for the last one
            trial.set_user_attr("surplus", True)
            self.tell(trial.number, self.states.FAIL)
            return False
        name = f"{runs.safe_name(self.plan.options.study)}-trial{trial.number:04}"
        active = ActiveTrial(trial, self.plan.new_runs(name, settings))
        trial.set_user_attr("runs", [str(run.path) for run in active.runs])
        self.mine.append(active)
        self.exchange_signs()
        self.pool.add(*active.runs)
        self.table.message(f"trial {trial.number}: {words(settings)}")
        return True

    def settle(self, active: ActiveTrial) -> None:
        """Report the progress of a trial, and end it where it is pruned, failed or complete."""
        codes = [run.exit_code for run in active.runs]
        try:
            for step, value in self.plan.reports(active.runs)[active.reported :]:
                active.trial.report(value, step)
                active.reported += 1
                if any(code is None for code in codes) and active.trial.should_prune():
                    self.end(active, self.states.PRUNED, f"pruned at step {step} with {value:.6g}")
                    return
            if any(codes):
                self.end_after_error(active, next(run for run in active.runs if run.exit_code))
            elif None not in codes:
                self.complete(active)
        except self.lost:
            self.drop(active)
            self.table.message(f"trial {active.trial.number} had been given to another process")

    def complete(self, active: ActiveTrial) -> None:
        """End a trial whose runs are complete with the mean of their scores; one that is not finite is a bad one."""
        try:
            scores = [self.plan.score(run) for run in active.runs]
        except (LookupError, FileNotFoundError) as error:
            self.fail(active, str(error.args[0] if isinstance(error, LookupError) else error))
            return
        active.trial.set_user_attr("scores", scores)
        active.trial.set_user_attr("seconds", sum(run.seconds for run in active.runs))
        mean = statistics.fmean(scores)
        text = f"{self.plan.options.objective} {mean:.6g}"
        if math.isfinite(mean):
            self.end(active, self.states.COMPLETE, text, mean)
        else:
            self.end(active, self.states.PRUNED, text)

    def end_after_error(self, active: ActiveTrial, run: TrainingRun) -> None:
        """End a trial of which a run failed: diverged settings are bad ones, a killed run is tried again."""
        assert run.exit_code is not None
        if run.exit_code < 0:
            text = "it is tried again" if self.retry(active) else "given up"
            self.table.message(f"trial {active.trial.number}: its run was killed by signal {-run.exit_code}; {text}")
            return
        if run.exit_code == NUMERIC:
            active.trial.set_user_attr("error", run.error())
            self.end(active, self.states.PRUNED, f"diverged with {run.error()}")
        else:
            self.fail(active, run.error(), f"see {run.log}: ")

    def fail(self, active: ActiveTrial, error: str, where: str = "") -> None:
        """End a trial as failed; the sweep too, if all trials so far have failed."""
        active.trial.set_user_attr("error", error)
        self.end(active, self.states.FAIL, f"failed with {error}")
        states = [trial.state for trial in self.study.get_trials(deepcopy=False)]
        has_success = self.states.COMPLETE in states or self.states.PRUNED in states
        self.failures = 0 if has_success else self.failures + 1
        if self.failures >= MAX_FAILURES:
            raise UserError(f"the first {MAX_FAILURES} trials failed; {where}{error}")

    def end(self, active: ActiveTrial, state: Any, text: str, value: float | None = None) -> None:
        """Tell the study how a trial ended."""
        self.tell(active.trial.number, state, value)
        self.drop(active)
        self.table.message(f"trial {active.trial.number}: {text}")

    def tell(self, number: int, state: Any, value: float | None = None) -> None:
        """Finish a trial."""
        try:
            self.study.tell(number, value, state=state)
        except self.lost:
            raise
        except ValueError as error:  # the same, where Optuna notices it earlier
            raise self.lost(str(error)) from error
        except RuntimeError:  # after the last combination a grid stops `study.optimize`, which does not run here
            pass

    def drop(self, active: ActiveTrial) -> None:
        """Stop the runs of a trial and forget it."""
        self.mine.remove(active)
        self.pool.stop(*active.runs)
        self.synced = -math.inf

    def exchange_signs(self) -> None:
        """Show other processes that this one is alive, and try the trials of those again that are not."""
        from optuna.storages import fail_stale_trials

        for active in self.mine:
            storage: Any = active.trial.storage
            storage.record_heartbeat(active.trial._trial_id)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is marked as experimental
            fail_stale_trials(self.study)

    def retry(self, active: ActiveTrial, attempt: int = 1) -> bool:
        """Fail a trial of this process and queue its settings again; whether they are queued by this process."""
        self.drop(active)
        try:
            self.tell(active.trial.number, self.states.FAIL)
        except self.lost:  # another process took it for dead
            return False
        return try_again(self.study, self.study.get_trials(deepcopy=False)[active.trial.number], attempt)

    def progress(self, trials: Sequence["FrozenTrial"]) -> tuple[str, list[str], list[list[str]]]:
        """Title, head and rows of the live table: the best and the newest trials."""
        live = counting(trials)
        done = [trial for trial in live if trial.state.is_finished()]
        complete = [trial for trial in live if trial.state == self.states.COMPLETE]
        is_high = self.plan.options.direction == "maximize"
        ranked = sorted(complete, key=lambda trial: trial.value or 0.0, reverse=is_high)
        title = f"{self.plan.options.task}: {len(done)} of {self.plan.options.trials} trials"
        total = self.plan.train.total_timesteps * self.plan.options.seeds
        steps = {a.trial.number: f"{min(1.0, sum(run.step for run in a.runs) / total):.0%}" for a in self.mine}
        rows: list[list[str]] = []
        for trial in [*ranked[:5], *(trial for trial in live if trial.state == self.states.RUNNING)]:
            is_running = trial.state == self.states.RUNNING
            value = trial.intermediate_values.get(trial.last_step or -1) if is_running else trial.value
            state = steps.get(trial.number, "elsewhere") if is_running else "complete"
            rows.append(
                [str(trial.number), state, short(value), *(short(trial.params.get(n)) for n in self.plan.space)]
            )
        return title, ["trial", "state", self.plan.options.objective, *self.plan.space], rows


def words(settings: Mapping[str, Any]) -> str:
    """Settings in one line."""
    return ", ".join(f"{name} {short(value)}" for name, value in settings.items())
