"""Training in two stages: first on recorded trajectories, then in the environment."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.envs.vec_env import VecEnv
from canter.runners.on_policy_runner import OnPolicyRunner
from canter.runners.run_config import plain
from canter.storage.rollout_files.rollout_dataset import RolloutDataset
from canter.utils.distributed import RANKS
from canter.utils.tree import Obs, tree_leaves, tree_map

LOG_INTERVAL = 50


class TwoStageRunner(OnPolicyRunner):
    """Learns from a dataset for `pretrain_iterations`, then as `OnPolicyRunner` does.

    The algorithm must accept recorded steps (`collect_transition_from_dataset`), as TPPO and its variants do. With TPPO
    and no teacher, stage one is behaviour cloning and stage two is PPO. Timesteps include recorded steps.

    Args:
        train_cfg: Training dict with `pretrain_dataset`, the settings of a `RolloutDataset`, and `pretrain_iterations`
            (default 0; a negative number never ends stage one), unless they are given as arguments.
    """

    def __init__(
        self,
        env: Any,
        train_cfg: Any = None,
        *args: Any,
        pretrain_iterations: int | None = None,
        pretrain_dataset: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = dict(train_cfg) if isinstance(train_cfg, Mapping) else {}
        given |= given.pop("runner", None) or {}
        iterations, source = given.pop("pretrain_iterations", None), given.pop("pretrain_dataset", None)
        self.pretrain_iterations = int((iterations if pretrain_iterations is None else pretrain_iterations) or 0)
        self.pretrain_dataset = dict((source if pretrain_dataset is None else pretrain_dataset) or {})
        if not self.pretrain_dataset:
            raise AssertionError("TwoStageRunner needs pretrain_dataset, settings of a RolloutDataset: {data_dir: ...}")
        if given.get("log_interval") is None and kwargs.get("log_interval") is None:
            kwargs["log_interval"] = LOG_INTERVAL
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"\w+ has no teacher")  # the dataset replaces it
            super().__init__(env, given if isinstance(train_cfg, Mapping) else train_cfg, *args, **kwargs)
        stage = {"pretrain_dataset": self.pretrain_dataset, "pretrain_iterations": self.pretrain_iterations}
        self.cfg.training_dict = {**self.cfg.training_dict, **stage}
        if self.pretrain_iterations and not hasattr(self.alg, "collect_transition_from_dataset"):
            way_out = "use TPPO (without a teacher it clones behaviour), or pretrain_iterations=0"
            raise TypeError(f"{type(self.alg).__name__} cannot learn from recorded steps; {way_out}")
        source = dict(self.pretrain_dataset)
        if source.get("seed") is not None:
            source["seed"] = RANKS.seed(source["seed"])
        self.rollout_dataset = RolloutDataset(**source, num_envs=self.env.num_envs, device=self.device)
        self.is_exhausted = False
        self.is_on_dataset = False  # whether the last step, and with it `obs`, came from the dataset
        self.dataset_infos: dict[str, float] = {}
        self._is_checked = False

    @property
    def is_pretraining(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the next iteration learns from the dataset."""
        is_planned = self.pretrain_iterations < 0 or self.iteration < self.pretrain_iterations
        return is_planned and not self.is_exhausted

    def config(self) -> dict[str, Any]:
        """The whole configuration in plain containers."""
        own = {"pretrain_iterations": self.pretrain_iterations, "pretrain_dataset": plain(self.pretrain_dataset)}
        return {**super().config(), **own}

    def run_iteration(self) -> dict[str, float]:
        """Collect from the dataset or the environment, learn, and return the iteration's metrics."""
        metrics = super().run_iteration()
        infos, self.dataset_infos = self.dataset_infos, {}
        return metrics | {f"Perf/dataset_{name}": value for name, value in infos.items()}

    def collect(self) -> None:
        """Collect one rollout; if the dataset ends in the middle of it, collect it from the environment instead."""
        has_ended = False
        was_pretraining = self.is_pretraining
        try:
            super().collect()
        except StopIteration:
            has_ended = True
        if was_pretraining and RANKS.agree(has_ended):  # of any rank
            self.is_exhausted = True
            now = f"in iteration {self.iteration}; training continues in the environment"
            warnings.warn(f"the pretraining dataset ended {now}", stacklevel=2)
            self.alg.rollout.clear()
            self.alg.teacher.on_dataset = False
            self.stats.tracker.rewind()
            super().collect()

    def rollout_step(self, obs: Any, critic_obs: Any, **kwargs: Any) -> tuple[Obs, Obs, Tensor, Tensor, dict[str, Any]]:
        """Take a step from the dataset while pretraining; from the environment later, and if the dataset has none."""
        if not self.is_pretraining:
            if self.is_on_dataset:
                self.alg.check_can_learn()
                self.is_on_dataset = False  # statistics and memories of the dataset end here
                self.alg.end_episodes()
                self.stats.clear_running()
                self.rewbuffer.clear()
                self.lenbuffer.clear()
                obs, critic_obs = self.env.get_observations()
            return super().rollout_step(obs, critic_obs, **kwargs)
        transition, infos = self.rollout_dataset.get_transition_batch()
        self.dataset_infos |= {name: float(value) for name, value in infos.items() if name != "time_outs"}
        if transition is None:
            if RANKS.size > 1:
                raise ValueError(f"rank {RANKS.rank} found no steps in the dataset: several ranks need a complete one")
            obs, critic_obs = self.env.get_observations()
            return super().rollout_step(obs, critic_obs, **kwargs)
        if not self._is_checked:
            check_fit(transition, self.env)
            self._is_checked = True
        self.is_on_dataset = True
        # Without time_outs: nothing is bootstrapped here, so missing final observations need no warning.
        self.alg.collect_transition_from_dataset(transition, {k: v for k, v in infos.items() if k != "time_outs"})
        self.stats.tracker.step += 1
        # The dataset's buffers are overwritten by its next step.
        next_obs = tree_map(torch.clone, transition.next_observation)
        is_same = transition.next_privileged_observation is transition.next_observation
        next_critic = next_obs if is_same else tree_map(torch.clone, transition.next_privileged_observation)
        return next_obs, next_critic, transition.reward, transition.done, infos

    def extra_state(self) -> dict[str, Any]:
        """State of the runner for exact continuation, with the stage and the position in the dataset."""
        own = {"on_dataset": self.is_on_dataset, "is_exhausted": self.is_exhausted}
        return {**super().extra_state(), **own, "dataset": self.rollout_dataset.state_dict()}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `extra_state`, in the dataset too if its files still exist."""
        super().load_extra_state(state)
        try:
            self.rollout_dataset.load_state_dict(state.get("dataset") or {})
        except LookupError as error:
            warnings.warn(f"the pretraining dataset starts from its beginning: {error}", stacklevel=2)
        self.is_exhausted = bool(state.get("is_exhausted", False))
        self.is_on_dataset = bool(state.get("on_dataset", False)) and bool(state["is_exact"])


def check_fit(transition: Any, env: VecEnv) -> None:
    """Raise ValueError with every difference if the dataset's observations do not fit the environment."""
    obs, critic_obs = env.get_observations()
    names = ["observation"] if critic_obs is obs else ["observation", "privileged_observation"]
    recorded = tree_leaves({name: getattr(transition, name) for name in names})
    got = {leaf: tuple(value.shape[1:]) for leaf, value in recorded}
    current = tree_leaves(dict(zip(names, (obs, critic_obs), strict=False)))
    want = {leaf: tuple(value.shape[1:]) for leaf, value in current}
    differing = sorted(leaf for leaf in got.keys() | want.keys() if got.get(leaf) != want.get(leaf))
    if differing:
        problems = (f"{leaf}: dataset {got.get(leaf)}, environment {want.get(leaf)}" for leaf in differing)
        raise ValueError(f"the dataset is of another environment: {'; '.join(problems)}")
