"""Every setting of a run and of PPO, declared once."""

from __future__ import annotations

import math
from typing import Any

from canter.utils.config import settings


@settings
class CommonRunSettings:
    """How any run is made: logging, saving, evaluation."""

    seed: int | None = None
    """Seed of weights, exploration, minibatches and environments; None draws one."""
    device: str | None = None
    """Where to learn; None takes a GPU if there is one."""
    keep_checkpoints: int | None = 5
    """How many periodic checkpoints to keep; None keeps all."""
    eval_episodes: int = 10
    """Episodes of a periodic evaluation."""
    extra_log_keys: tuple[str, ...] = ("episode", "log")
    """Keys of the environment's extras that are logged."""
    logger_backend: str | tuple[str, ...] = "tensorboard"
    """tensorboard, wandb, swanlab, neptune, or several; metrics.jsonl is always written."""
    logger_kwargs: dict[str, Any] | None = None
    """Options of the logging backend; nested by backend name if there are several."""
    inference_mode_rollout: bool = True
    """Collect under torch.inference_mode."""
    callback_errors: str = "raise"
    """What an exception in a callback does: "raise" or "warn"."""
    trial_metric: str = "velrmsd"
    """What a hyper-parameter trial is told: velrmsd, CoT or mean_reward."""
    git_diff: bool = False
    """Keep the text of uncommitted changes in the run directory, not only the names of the files."""


@settings
class RunSettings(CommonRunSettings):
    """How a run of rollouts is made: lengths, logging, saving, evaluation."""

    num_steps_per_env: int = 24
    """Steps of each environment between two updates."""
    max_iterations: int | None = None
    """Length of the run where `learn` is not told another; linear schedules end here."""
    log_interval: int = 1
    """Iterations between two log entries."""
    save_interval: int = 100
    """Iterations between two checkpoints; 0 saves only at the end."""
    eval_interval: int | None = None
    """Iterations between two evaluations; None evaluates only on request."""


@settings
class PPOSettings:
    """What PPO can be told; the defaults are the documented ones."""

    num_learning_epochs: int = 1
    """Passes over each rollout."""
    num_mini_batches: int = 1
    """Minibatches per pass."""
    clip_param: float = 0.2
    """Clip range of the probability ratio and of the value step."""
    gamma: float = 0.998
    """Discount."""
    lam: float = 0.95
    """Decay of the advantage estimate."""
    value_loss_coef: float = 1.0
    """Weight of the value loss, a mean square."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    learning_rate: float = 1e-3
    """Step size; where it starts if a schedule moves it."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    use_clipped_value_loss: bool = True
    """Clip the value step by `clip_param` too."""
    clip_min_std: float | tuple[float, ...] = 1e-15
    """Floor of the exploration noise, one number or one per action."""
    clip_max_std: float | tuple[float, ...] | None = None
    """Cap of the exploration noise."""
    optimizer_class_name: str = "Adam"
    """Any optimizer of torch.optim."""
    schedule: str = "fixed"
    """Learning rate: "fixed" (or "constant"), "linear" to 0, or "adaptive" by the KL step."""
    desired_kl: float = 0.01
    """KL step that the adaptive schedule aims at."""
    clip_schedule: str = "fixed"
    """Clip range: "fixed" or "linear" to 0."""
    target_kl: float | None = None
    """Stop the passes over a rollout once the mean KL of one exceeds this."""
    normalize_advantage_per_mini_batch: bool = False
    """Normalise advantages in each minibatch instead of over the rollout."""
    empirical_normalization: bool = False
    """Normalise observations by running statistics, kept in the policy."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    value_normalization: str = "off"
    """Learn returns of mean 0 and std 1: "off", "running", or "popart", which keeps every value as statistics move."""
    symmetry_cfg: dict[str, Any] | None = None
    """Learn from mirror images too: mirrors of `obs`, `critic_obs` and `actions`, `augment`, `mirror_loss_coef`."""
    timeout_bootstrap: str = "auto"
    """Value added where an episode was cut off: "final_obs", "current_value", "none", or "auto": the best there is."""
    parameter_groups: dict[str, dict[str, Any]] | None = None
    """Optimizer options by parameter name prefix, e.g. {"critic": {"lr": 1e-3, "weight_decay": 1e-4}}."""
    rnd_cfg: dict[str, Any] | None = None
    """Random network distillation; off if None."""
    execution: str = "auto"
    """How hot functions run: "eager", "graph" (CUDA graphs; on a CPU recordings), "compile" (compiled too), "auto"."""
    precision: str = "tf32"
    """Of matrix products on a GPU: "tf32", "fp32" or "bf16"; weights, log-probabilities and losses stay float32."""


WHOLE = ("num_learning_epochs", "num_mini_batches")
RANGES = {
    "num_learning_epochs": (1, math.inf),
    "num_mini_batches": (1, math.inf),
    "clip_param": (0.0, math.inf),
    "gamma": (0.0, 1.0),
    "lam": (0.0, 1.0),
    "value_loss_coef": (0.0, math.inf),
    "learning_rate": (0.0, math.inf),
    "max_grad_norm": (0.0, math.inf),
}


def check_ranges(given: PPOSettings) -> None:
    """Refuse numbers with which nothing can be learned, NaN among them."""
    for name, (low, high) in RANGES.items():
        value = getattr(given, name)
        if not low <= value <= high:
            wanted = f"from {low} to {high}" if high < math.inf else f"of at least {low}"
            raise ValueError(f"{name} must be a {'whole ' if name in WHOLE else ''}number {wanted}, got {value!r}")


@settings
class PPOConfig(PPOSettings, RunSettings):
    """A whole PPO run in one object; defaults that suit most tasks."""

    num_learning_epochs: int = 5
    num_mini_batches: int = 4
    gamma: float = 0.99
    learning_rate: float = 3e-4
    schedule: str = "adaptive"
    log_interval: int = 10
