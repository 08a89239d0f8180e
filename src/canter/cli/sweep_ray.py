"""`canter sweep --engine ray`: the trials of a sweep under Ray Tune, on this machine or on a cluster."""

# pyright: reportMissingImports=false
# Ray is not part of the development environment.

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canter.cli import runs
from canter.cli.errors import UserError, user_errors
from canter.cli.run_process import POLL_S, RunPool
from canter.cli.search_space import Space, settings_of, starting_point, suggest
from canter.cli.sweep import Plan, import_optuna, optuna_object, parse_sweep, sampler_args

if TYPE_CHECKING:
    import optuna

MAX_FAILURES = 2  # of a trial whose process ended, before Ray gives it up


def run_ray(plan: Plan) -> optuna.Study:
    """Run the trials of a sweep under Ray Tune; returns them as an Optuna study in memory."""
    try:
        import ray
        from ray import tune
        from ray.tune.schedulers import ASHAScheduler
        from ray.tune.search.optuna import OptunaSearch
    except ImportError as error:
        raise UserError('--engine ray needs packages that are not installed: pip install "canter[ray]"') from error
    optuna, options = import_optuna(), plan.options
    with user_errors():
        sampler = optuna_object(optuna.samplers, "Sampler", options.sampler, sampler_args(plan))
    local: dict[str, Any] = {} if options.address else {"include_dashboard": False, "num_cpus": options.jobs}
    # Without an address Ray would join a cluster that someone else has started on this machine.
    ray.init(address=options.address or "local", log_to_driver=False, ignore_reinit_error=True, **local)
    gpus = 1 if ray.cluster_resources().get("GPU") and plan.train.settings.device in (None, "cuda") else 0
    trainable = tune.with_resources(
        tune.with_parameters(train_trial, args=plan.args, folder=str(Path.cwd())), {"cpu": options.seeds, "gpu": gpus}
    )
    place = (plan.folder / "ray").resolve()
    if tune.Tuner.can_restore(str(place)):
        tuner = tune.Tuner.restore(str(place), trainable, resume_unfinished=True, restart_errored=True)
    else:
        mode: Any = options.direction[:3]
        start = starting_point(plan.space, plan.train)
        total = plan.train.total_timesteps
        search = OptunaSearch(
            partial(define_by_run, space=plan.space),
            metric="score",
            mode=mode,
            sampler=sampler,
            points_to_evaluate=None if start is None else [start],
        )
        asha = ASHAScheduler("timesteps", max_t=total + 1, grace_period=max(1, total // 3), metric="score", mode=mode)
        tuner = tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                num_samples=options.trials,
                search_alg=search,
                max_concurrent_trials=options.jobs,
                scheduler=None if options.pruner in ("nop", "none") else asha,
            ),
            run_config=tune.RunConfig(
                name=place.name,
                storage_path=str(place.parent),
                verbose=1,
                failure_config=tune.FailureConfig(max_failures=MAX_FAILURES),
            ),
        )
    results = tuner.fit()
    ray.shutdown()
    return to_study(plan, results)


def define_by_run(trial: Any, space: Space) -> None:
    """Draw the settings of a trial, which Ray reads from the trial itself."""
    suggest(trial, space)


def train_trial(config: dict[str, Any], args: Sequence[str], folder: str) -> None:
    """Train the runs of one trial in a worker of Ray, and report their mean."""
    from ray import tune

    Path(folder).mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # paths in the flags are relative to it
    plan = parse_sweep(args)
    stem = f"{runs.safe_name(plan.options.study)}-ray{tune.get_context().get_trial_id()}"
    parent, first = plan.folder.parent, plan.train.settings.seed
    attempts = (stem if n == 1 else f"{stem}-{n}" for n in range(1, MAX_FAILURES + 2))
    name = next(name for name in attempts if not (parent / f"{name}-seed{first}").exists())
    with RunPool(plan.options.seeds, plan.train.settings.device) as pool:
        group = plan.new_runs(name, settings_of(config, plan.space))
        pool.add(*group)
        reported = 0
        while pool.active or pool.waiting:
            time.sleep(POLL_S)
            pool.poll()
            for step, value in plan.reports(group)[reported:]:
                tune.report({"score": value, "timesteps": step})
                reported += 1
            if bad := [run for run in group if run.exit_code]:
                raise RuntimeError(f"{bad[0].path.name} failed with {bad[0].error()}")
        scores = [plan.score(run) for run in group]
        seconds = sum(run.seconds for run in group)
    done = {"scores": scores, "runs": "\n".join(str(run.path) for run in group), "seconds": seconds}
    tune.report({"score": statistics.fmean(scores), "timesteps": plan.train.total_timesteps + 1, **done})


def to_study(plan: Plan, results: Any) -> optuna.Study:
    """The results of Ray Tune as a study: trials without a final score were stopped early, or failed."""
    optuna = import_optuna()
    study = optuna.create_study(direction=plan.options.direction)
    states = optuna.trial.TrialState
    for result in results:
        fixed = optuna.trial.FixedTrial(result.config)
        suggest(fixed, plan.space)
        metrics = result.metrics or {}
        state = states.COMPLETE if "scores" in metrics else states.FAIL if result.error else states.PRUNED
        attrs = {name: metrics[name] for name in ("scores", "runs", "seconds") if name in metrics}
        if "runs" in attrs:  # one text, because Ray's loggers refuse lists of them
            attrs["runs"] = attrs["runs"].splitlines()
        if result.error is not None:
            attrs["error"] = str(result.error).strip().splitlines()[-1]
        study.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=metrics["score"] if state == states.COMPLETE else None,
                params=fixed.params,
                distributions=fixed.distributions,
                user_attrs=attrs,
            )
        )
    return study
