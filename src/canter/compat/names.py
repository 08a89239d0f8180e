"""What the scripts and exporters of rsl_rl, Isaac Lab and mjlab call on a runner, an algorithm and a policy."""

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from canter.compat.checkpoints import load_options
from canter.utils.checkpoint import damaged_content

if TYPE_CHECKING:
    from canter.runners.evaluation import InferencePolicy


HINT = (
    "in a runner, self.env.get_observations() gives (obs, critic_obs) instead of (obs, extras), and "
    "self.env.step(actions) a StepRecord with obs, critic_obs, reward, terminated, truncated and extras"
)


def with_hint(learn: Callable[..., Any]) -> Callable[..., Any]:
    """A `learn` whose errors about what the environment returns say what it returns."""

    @functools.wraps(learn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return learn(*args, **kwargs)
        except (IndexError, KeyError, ValueError) as error:
            if isinstance(error, ValueError) and "unpack" not in str(error):
                raise
            raise type(error)(f"{error}; {HINT}") from error

    return call


class RunnerNames:
    """Calls of a runner under the names of rsl_rl, st_rl and ApexRL."""

    alg: Any
    env: Any
    callbacks: Any
    metrics_velrmsd: float = math.nan
    """Velocity tracking error that the environment measures, as `metrics_CoT` is the cost of transport."""
    metrics_CoT: float = math.nan  # noqa: N815 (documented)
    checkpoints: Any
    iteration: int
    git_repos: list[str]
    init_writer: Callable[..., None]
    save: Callable[..., None]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "learn" in vars(cls) and not cls.__module__.startswith("canter."):
            cls.learn = with_hint(vars(cls)["learn"])

    @property
    def current_learning_iteration(self) -> int:
        """Number of completed iterations."""
        return self.iteration

    @current_learning_iteration.setter
    def current_learning_iteration(self, iteration: int) -> None:
        self.iteration = int(iteration)

    @property
    def git_status_repos(self) -> list[str]:
        """Files whose git repositories are recorded."""
        return self.git_repos

    def add_git_repo_to_log(self, repo_file_path: str) -> None:
        """Record the state of the git repository that contains this file."""
        self.git_repos.append(repo_file_path)

    def export_policy_to_onnx(self, path: str | Path, filename: str = "policy.onnx", verbose: bool = False) -> None:
        """Write the policy as a checked ONNX file; `canter export` writes a whole bundle."""
        from canter.compat.exporters import write_onnx  # the exporters load slowly

        write_onnx(self, Path(path) / filename)

    def export_policy_to_jit(self, path: str | Path, filename: str = "policy.pt") -> None:
        """Write a checked TorchScript file: `module(obs)` gives actions, `module.reset()` clears memories."""
        from canter.compat.exporters import write_jit

        write_jit(self, Path(path) / filename)

    def load(
        self,
        path: str | Path,
        load_optimizer: bool | Mapping[str, bool] | None = True,
        map_location: Any = None,
        *others: Any,
        load_cfg: Mapping[str, bool] | None = None,
        strict: bool = True,
    ) -> Any:
        """Continue from a checkpoint of canter or of another library; returns the `infos` saved with it.

        `load_cfg` selects parts: `{"actor": True}` loads the actor with its normaliser alone; "critic", "optimizer",
        "iteration" and "rnd" are the others. Without `strict`, tensors that one side lacks keep their values.
        Arguments by position may have the orders of `load_options`.
        """
        options = load_options(load_optimizer, map_location, others, load_cfg, strict)
        with damaged_content(path := Path(path)):
            return self.checkpoints.load(path, *options)

    def save_checkpoint(self, name: str) -> Path:
        """Write a checkpoint to a path relative to `save_dir`."""
        path = self.checkpoints.locate(name)
        self.save(path)
        return path

    def load_checkpoint(self, name: str, load_optimizer: bool = True) -> Any:
        """Continue from a checkpoint at a path relative to `save_dir`."""
        return self.load(self.checkpoints.locate(name), load_optimizer)

    def train_mode(self) -> None:
        """Switch networks and normalisers to training mode."""
        self.alg.train_mode()

    def eval_mode(self) -> None:
        """Switch networks and normalisers to evaluation mode."""
        self.alg.eval_mode()

    def get_inference_policy(self, device: torch.device | str | None = None) -> "InferencePolicy":
        """A callable from raw observations to deterministic actions, with `reset(dones)` for recurrent policies."""
        from canter.runners.evaluation import inference_policy  # which imports the policies

        return inference_policy(self, device)

    def add_callback(self, event: str, fn: Callable[..., None]) -> None:
        """Call `fn(runner)` at a `pre_*` event, or `fn(runner, stats)` at a `post_*` event, of every iteration."""
        self.callbacks.add(event, fn)

    def evaluation(self) -> None:
        """Read the robot metrics of the environment, which is not stepped."""
        for name, source in (("metrics_velrmsd", "tracking_error"), ("metrics_CoT", "CoT")):
            value = getattr(self.env, source, None)
            setattr(self, name, math.nan if value is None else float(torch.as_tensor(value).float().mean()))

    def robot_metrics(self) -> dict[str, float]:
        """The robot metrics that the environment measures, by their logged names."""
        values = {"eval/velrmsd": self.metrics_velrmsd, "eval/CoT": self.metrics_CoT}
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def init_writter(self, init_at_random_ep_len: bool = False) -> None:
        """`init_writer` as it is spelt in st_rl."""
        self.init_writer(init_at_random_ep_len)

    @property
    def logger(self) -> "RunnerLogger":
        """The attributes of rsl_rl's logger that launch scripts and subclasses read."""
        return RunnerLogger(self)

    @property
    def gpu_world_size(self) -> int:
        """Number of processes that torchrun started."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def gpu_global_rank(self) -> int:
        """Number of this process."""
        return int(os.environ.get("RANK", "0"))

    @property
    def gpu_local_rank(self) -> int:
        """Number of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def is_distributed(self) -> bool:
        """Whether torchrun started several processes."""
        return self.gpu_world_size > 1

    @property
    def disable_logs(self) -> bool:
        """Whether another process writes the logs."""
        return self.is_distributed and self.gpu_global_rank != 0


class RunnerLogger:
    """A runner's logging under the names of rsl_rl's `Logger`."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.log_dir, self.writer = runner, runner.log_dir and str(runner.log_dir), runner.writer
        self.git_status_repos, self.cfg, self.tot_timesteps = runner.git_repos, runner.cfg, runner.tot_timesteps
        self.rewbuffer, self.lenbuffer = runner.rewbuffer, runner.lenbuffer
        self.disable_logs = runner.disable_logs

    @property
    def logger_type(self) -> str:
        """Name of the first logging backend."""
        backend = self.cfg.logger_backend
        return backend if isinstance(backend, str) else backend[0]

    def save_model(self, path: str | Path, it: int) -> None:
        """Send a checkpoint to the logging services."""
        if self.writer is not None:
            self.writer.save_model(Path(path), it)


class AlgorithmNames:
    """What rsl_rl and st_rl call on an algorithm."""

    policy: Any
    extensions: dict[str, Any]

    def get_policy(self) -> Any:
        """The policy, as in rsl_rl 3.x and later."""
        return self.policy

    @property
    def actor_critic(self) -> Any:
        """The policy, as in rsl_rl 1.x and 2.x and in st_rl."""
        return self.policy

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler of the learning rate, which is stepped once per update; its settings are `cfg.lr_scheduler`."""
        made = getattr(self.extensions.get("teacher"), "lr_scheduler_object", None)
        if made is None:
            raise AttributeError("no lr_scheduler_class_name is set")
        return made


class PolicyNames:
    """A policy under the names of rsl_rl's."""

    obs_normalizer: Any

    @property
    def actor_obs_normalizer(self) -> Any:
        """The normaliser of the actor's observation."""
        return self.obs_normalizer

    def as_onnx(self, verbose: bool = False) -> Any:
        """The deterministic step as a module for `torch.onnx.export`."""
        from canter.compat.exporters import InferencePolicy, OnnxStep  # the exporters load slowly

        return OnnxStep(InferencePolicy(self))  # pyright: ignore[reportArgumentType]

    def as_jit(self) -> Any:
        """The deterministic step as a TorchScript module with a `reset()`."""
        from canter.compat.exporters import InferencePolicy, jit_module

        return jit_module(InferencePolicy(self))  # pyright: ignore[reportArgumentType]


class StorageNames:
    """A rollout storage under the names of st_rl."""

    recurrent_mini_batch_generator: Callable[..., Iterator[Any]]

    def reccurent_mini_batch_generator(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """`recurrent_mini_batch_generator` as it is spelt in st_rl."""
        return self.recurrent_mini_batch_generator(*args, **kwargs)
