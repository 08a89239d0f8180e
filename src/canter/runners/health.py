"""Whether a training is well: diverged networks, skipped updates, collapsed noise, and memory that ran out."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from canter.runners.run_log import StopTraining
from canter.utils.memory import is_out_of_memory, out_of_memory
from canter.utils.metrics import DivergedError, NonFiniteError

if TYPE_CHECKING:
    from canter.runners.runner import Runner

MEMORY_SETTINGS = ("num_envs", "num_steps_per_env", "buffer_size", "batch_size", "num_mini_batches")
MOST_NOISE = 1e6  # standard deviation of actions; no action space is as wide
LEAST_NOISE, MAX_QUIET = 1e-4, 100  # standard deviation of actions; reports in a row below it, until a warning
MAX_SKIPPED = 10  # reports in a row without one update that was applied


class TrainingHealth:
    """Stops a runner whose training went wrong, with an error that names the cause and the settings to change."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.num_skipped = self.num_quiet = 0  # reports in a row

    @contextlib.contextmanager
    def explained_errors(self) -> Iterator[None]:
        """Blame an error of an iteration on the policy if its parameters or actions are not finite."""
        try:
            yield
        except (NonFiniteError, StopTraining):
            raise
        except Exception as error:  # environments react to actions that are NaN in many ways
            if not is_out_of_memory(error):
                self.raise_if_diverged(cause=error)
            raise

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raise DivergedError if losses are not finite or no update is applied; warn if the noise collapsed."""
        losses = [value for name, value in metrics.items() if name.startswith("train/")]
        if not all(map(math.isfinite, losses)):
            self.raise_if_diverged()
        if losses:
            self.num_skipped = self.num_skipped + 1 if self.runner.alg.skipped_share >= 1.0 else 0
            if self.num_skipped >= MAX_SKIPPED:
                found = f"every update of the last {MAX_SKIPPED} reports was skipped, its gradient was NaN or infinite"
                raise self._divergence(found)
        if (noise := metrics.get("policy/mean_noise_std")) is not None:
            self.num_quiet = self.num_quiet + 1 if noise < LEAST_NOISE else 0
            if self.num_quiet == MAX_QUIET:
                found = f"the action noise collapsed: its standard deviation is {noise:.2g} on average"
                way_out = "raise clip_min_std or entropy_coef, or lower the learning rate"
                warnings.warn(f"{found}, for {MAX_QUIET} reports now, so nothing new is tried; {way_out}", stacklevel=5)

    def check_end(self, metrics: Mapping[str, float]) -> None:
        """Raise DivergedError if the newest metrics of a run that ends show no learning: losses, noise or updates."""
        self.raise_if_diverged()
        if not metrics:
            return
        learned = {name: value for name, value in metrics.items() if name.startswith(("train/", "policy/"))}
        # A gradient without bounds alone is an update that was skipped.
        bad = [name for name, v in learned.items() if not math.isfinite(v) and not name.endswith("grad_norm")]
        if learned.get("policy/mean_noise_std", 0.0) > MOST_NOISE:
            bad.append("policy/mean_noise_std")
        if bad:
            raise self._divergence(f"{bad[0]} is {learned[bad[0]]:g} at the end of the run")
        if self.num_skipped:
            found = "the updates of the last report were all skipped, because their gradients were NaN or infinite"
            warnings.warn(f"{found}: the run may have diverged; lower the learning rate", stacklevel=3)

    def raise_if_diverged(self, actions: Tensor | None = None, cause: Exception | None = None) -> None:
        """Raise DivergedError if a parameter that learns, or an action (of the last ones if None), is NaN or infinite.

        It reads the device, so it is called only where something went wrong.
        """
        modules = self.runner.alg.modules()
        learned = ((name, p) for part in modules for name, p in part.named_parameters() if p.requires_grad)
        bad = [name for name, p in learned if not p.isfinite().all()]
        actions = self.runner.actions if actions is None else actions
        has_bad_actions = actions is not None and actions.is_floating_point() and not actions.isfinite().all()
        if not bad and not has_bad_actions:
            return
        found = f"parameter {bad[0]!r} is NaN or infinite" if bad else "its actions are NaN or infinite"
        found += f", the first of {len(bad)}" if len(bad) > 1 else ""
        raise self._divergence(found, "The environment is not the cause. ") from cause

    def _divergence(self, found: str, cause: str = "") -> DivergedError:
        """The error that names the iteration, what was found, the first metric that is not finite, and the ways out."""
        alg = self.runner.alg
        means = alg.meter.means() if hasattr(alg, "meter") else {}
        losses = [name for name, value in means.items() if not math.isfinite(value)]
        found += f"; the first such metric is {losses[0].rpartition('/')[2]!r}" if losses else ""
        rates = {name: getattr(alg, name) for name in getattr(alg, "rates", ("learning_rate",))}
        settings = rates | {"max_grad_norm": alg.cfg.max_grad_norm}
        lower = ", ".join(f"{name} (now {value or 0:g})" for name, value in settings.items())
        text = f"the policy diverged in iteration {self.runner.iteration + 1}: {found}. {cause}"
        return DivergedError(f"{text}Lower {lower}, scale the rewards down, or resume an earlier checkpoint")

    def memory_error(self, error: Exception) -> Exception:
        """The error for an iteration without enough memory, which names the settings to change."""
        runner = self.runner
        sizes = {"num_envs": runner.env.num_envs, **vars(runner.cfg)}
        sizes = {name: sizes[name] for name in MEMORY_SETTINGS if sizes.get(name) is not None}
        return out_of_memory(error, f"iteration {runner.iteration + 1}", runner.device, sizes)
