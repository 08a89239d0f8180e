"""The collecting half of every on-policy algorithm: act, keep the transition, bootstrap, compute returns."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.algorithms.setup import OnPolicySetup
from canter.envs.records import step_record
from canter.envs.vec_env import StepRecord
from canter.modules.policy import Hidden, PolicyOutput
from canter.utils.config import settings
from canter.utils.returns import masked_mean, timeout_bootstrap
from canter.utils.tree import Obs, tree_map, tree_where


@settings
class OnPolicyAlgorithm(OnPolicySetup):
    """Collects a rollout with a policy; a subclass learns from it."""

    # ------------------------------------------------------------------ collecting
    @torch.no_grad()  # a stored tensor with a graph would keep every rollout alive, and be walked back through
    def act(self, obs: Obs, critic_obs: Obs | None = None) -> Tensor:
        """Sample actions for N environments and begin their transition."""
        if self.rollout.step == 0:
            self.note_constants()
        hidden = self.policy.hidden(self.rollout.num_envs) if self.policy.is_recurrent else {}
        step = self.executor.run("act", self.act_step, obs, None if critic_obs is obs else critic_obs, hidden)
        vars(self.transition).update({name: value for name, value in step.items() if name != "for_env"})
        self.acted = step
        self.policy.set_hidden(step["next_hidden"])
        return step["for_env"].clone()  # the environment may keep it, or write to it

    def act_step(self, obs: Obs, critic_obs: Obs | None, hidden: Hidden) -> dict[str, Any]:
        """What acting adds to a transition, and the actions as the environment wants them."""
        policy = self.policy
        tosses = policy.draw_random_masks(obs, self.generators["action"])
        out = self.forward(obs, critic_obs, hidden, tosses)
        actions = policy.sample_action(out.params, self.generators["action"])
        next_hidden = out.hidden
        if self.symmetry is not None:
            next_hidden = next_hidden | self.symmetry.follow(self.forward, obs, critic_obs, hidden, tosses)
        return {
            "observations": obs,
            "critic_observations": obs if critic_obs is None else critic_obs,
            "params": out.params,
            "values": out.value,
            "actions": actions,
            "actions_log_prob": policy.distribution.log_prob(out.params, actions),
            "hidden": hidden,
            "tosses": tosses,
            "next_hidden": next_hidden,
            "for_env": policy.distribution.to_env(actions),
        }

    def forward(
        self, obs: Obs, critic_obs: Obs | None, hidden: Hidden, tosses: Mapping[str, Tensor] | None = None
    ) -> PolicyOutput:
        """The policy's pass while collecting."""
        with self.executor.autocast():
            return self.policy(obs, critic_obs, hidden, None, tosses)

    def process_env_step(
        self, rewards: Tensor, dones: Tensor, infos: dict[str, Any], next_obs: Any = None, next_critic_obs: Any = None
    ) -> None:
        """Finish the transition from what an environment's step returned, as documented."""
        t = self.transition
        obs = t.observations if next_obs is None else next_obs  # for their shapes, where the next ones are not given
        critic_obs = t.critic_observations if next_critic_obs is None else next_critic_obs
        record = step_record(obs, critic_obs, rewards, dones, infos)
        self.process_step(record if next_obs is not None else record._replace(obs=None, critic_obs=None))  # pyright: ignore[reportArgumentType]

    @property
    def can_lag(self) -> bool:
        """Whether a step may be finished after the next actions were chosen: they depend on nothing it does."""
        is_own = type(self).finish_step is OnPolicyAlgorithm.finish_step
        return is_own and not self.policy.is_recurrent and not self.executor.uses_graphs

    def take_transition(self) -> dict[str, Any]:
        """The transition that acting began, to be finished later; another can be begun."""
        taken = dict(vars(self.transition))
        self.transition.clear()
        return taken

    @torch.no_grad()
    def process_step(self, record: StepRecord, transition: Mapping[str, Any] | None = None) -> None:
        """Finish the transition, the newest or the one given, with the record of the step it led to."""
        self.rollout.check_space()
        reached = None if self.rnd is None else record.critic_obs
        needed = record._replace(obs=None, extras=self.step_extras(record), critic_obs=reached)  # pyright: ignore[reportArgumentType]
        begun = self.take_transition() if transition is None else transition
        hidden = self.executor.run(
            "process", self.finish_step, self.acted if self.executor.uses_graphs else begun, needed
        )
        self.rollout.step += 1
        self.policy.set_hidden(hidden)

    def step_extras(self, record: StepRecord) -> dict[str, Tensor]:
        """The tensors that learning needs of what else the environment said. Extended by subclasses."""
        return {}

    def learned_reward(self, record: StepRecord) -> Tensor:
        """(N,) what is learned from; `record.extras` are those of `step_extras`. Extended by subclasses."""
        return record.reward

    def finish_step(self, transition: Mapping[str, Any], record: StepRecord) -> Hidden:
        """Write the transition's row; returns the state of the memories in the next step."""
        rewards = self.learned_reward(record)
        if self.return_scaler is not None:
            valid = record.valid if self.rollout.has_invalid_steps else None
            rewards = self.return_scaler(rewards, record.done, valid)
        if self.rnd is not None:
            rewards = rewards + self._intrinsic(record)
        rewards = self._bootstrapped(rewards, transition, record)
        dones = record.done
        if self.rollout.has_invalid_steps:  # a step that only resets begins and ends a trajectory of its own
            dones = dones | ~record.valid
        ends = {**record.extras, "rewards": rewards, "dones": dones, "valid": record.valid}
        self.rollout.write(self.rollout.row({**transition, **ends}))
        for note in self.on_record:
            note(record)
        ended = dones.view(-1, 1, 1, 1)
        return {name: state.masked_fill(ended, 0.0) for name, state in transition["next_hidden"].items()}

    def _bootstrapped(self, rewards: Tensor, transition: Mapping[str, Any], record: StepRecord) -> Tensor:
        """Rewards with the value of what a time limit cut off (behaviour 1.5)."""
        if self.timeout_bootstrap == "none":
            return rewards
        final = record.final_critic_obs
        if final is None or self.timeout_bootstrap == "current_value":
            if self.timeout_bootstrap != "current_value":
                self.fell_back |= record.truncated.any()
            values = transition["values"]
        else:
            values = self._value(final, transition["next_hidden"])
        return timeout_bootstrap(rewards, values.squeeze(-1), record.truncated, self.gamma)

    def _intrinsic(self, record: StepRecord) -> Tensor:
        assert self.rnd is not None
        reached: Any = record.critic_obs
        if reached is None:
            raise ValueError("rnd_cfg rewards the states reached: give process_env_step next_obs and next_critic_obs")
        if record.final_critic_obs is not None:
            reached = tree_where(record.done, record.final_critic_obs, reached)
        bonus = self.rnd.intrinsic_reward(reached, record.done, record.valid)
        self.rnd_rewards.add(
            {
                "rnd/mean_intrinsic_reward": masked_mean(bonus, record.valid),
                "rnd/mean_extrinsic_reward": masked_mean(record.reward, record.valid),
                "rnd/weight": self.rnd.weight(),
            }
        )
        return bonus

    def _value(self, critic_obs: Obs, hidden: Hidden) -> Tensor:
        with self.executor.autocast():
            return self.policy.value(critic_obs, hidden)[0]

    @torch.no_grad()
    def collect(self, env: Any, obs: Obs, critic_obs: Obs) -> tuple[Obs, Obs]:
        """A whole rollout and its returns, for an environment whose step is tensor code."""
        generator = getattr(env, "generator", None)
        if generator is not None and generator not in self.executor.generators:
            self.executor.generators.append(generator)
        self.note_constants()
        storage, given = self.rollout, None if critic_obs is obs else critic_obs
        storage.step = storage.num_transitions_per_env
        hidden = self.policy.hidden(storage.num_envs)
        obs, given, hidden = self.executor.run("rollout", self.rollout_steps, env, obs, given, hidden)
        self.policy.set_hidden(hidden)
        return obs, obs if given is None else given

    def rollout_steps(self, env: Any, obs: Obs, critic_obs: Obs | None, hidden: Hidden) -> tuple[Any, Any, Hidden]:
        """Act, step and keep, T times; then the returns."""
        for _ in range(self.rollout.num_transitions_per_env):
            transition = self.act_step(obs, critic_obs, hidden)
            record = env.step(transition["for_env"].clone())  # it may write to what it gets
            hidden = self.finish_step(transition, record._replace(extras=self.step_extras(record)))
            obs, critic_obs = record.obs, None if record.critic_obs is record.obs else record.critic_obs
        self.returns_step(obs if critic_obs is None else critic_obs, hidden, self.rollout.step)
        return obs, critic_obs, hidden

    @torch.no_grad()
    def compute_returns(self, last_critic_obs: Obs) -> None:
        """Returns and advantages of the rollout; no memory is advanced."""
        hidden = self.policy.hidden(self.rollout.num_envs)
        self.executor.run("returns", self.returns_step, last_critic_obs, hidden, self.rollout.step)

    def returns_step(self, last_critic_obs: Obs, hidden: Hidden, num_steps: int) -> None:
        """Fill returns and advantages of the `num_steps` steps that were written."""
        per_rollout = not self.normalize_advantage_per_mini_batch
        last_values = self._value(last_critic_obs, hidden)
        self.rollout.compute_returns(last_values, self.gamma, self.lam, normalize=per_rollout)

    def _report(self) -> tuple[dict[str, float], dict[str, float]]:
        scalars = self.meter.averages() | self._extra_scalars()
        read = dict(zip(scalars, torch.stack([v.float() for v in scalars.values()]).tolist(), strict=True))
        losses: dict[str, float] = defaultdict(float)
        stats: dict[str, float] = defaultdict(float)
        count = read.pop("count")
        for name, value in read.items():
            kind, _, rest = name.partition("/")
            (losses if kind == "losses" else stats)[rest] = value
        stats["nonfinite_updates"] *= count
        self.learning_rate = stats["learning_rate"]
        if stats.pop("fell_back", 0.0) and not self.has_warned:
            self.has_warned = True
            warnings.warn(
                "episodes were cut off but the environment gave no final observation: their value is taken from the "
                "state before the last step. Let the environment put the observation before the reset in "
                "extras['final_obs']",
                stacklevel=2,
            )
        return losses, stats

    def _extra_scalars(self) -> dict[str, Tensor]:
        used = self.rollout.newest
        valid = self.rollout.valid[used].squeeze(-1) if self.rollout.has_invalid_steps else None
        extra = {
            "stats/learning_rate": self.lr,
            "stats/fell_back": self.fell_back,
            "stats/rollout/mean_value": masked_mean(self.rollout.values[used], valid),
        }
        if "sigma" in self.rollout.param_shapes:
            extra["stats/policy/mean_noise_std"] = masked_mean(self.rollout.sigma[used], valid)
        extra |= {f"stats/{name}": value for name, value in self.rnd_rewards.averages().items() if name != "count"}
        self.rnd_rewards.reset()
        return extra

    def _update_normalizers(self) -> None:
        used = self.rollout.newest
        valid = self.rollout.valid[used].squeeze(-1) if self.rollout.has_invalid_steps else None
        if self.empirical_normalization:
            obs = _rows(self.rollout.observations, used)
            critic = self.rollout.privileged_observations
            critic_obs = obs if critic is None else _rows(critic, used)
            self.policy.update_normalizers(obs, critic_obs, valid)
            if self.symmetry is not None:  # so that normalising a mirror image gives the mirror image
                self.policy.update_normalizers(self.symmetry.obs(obs), self.symmetry.critic_obs(critic_obs), valid)
        self.policy.value_normalizer.update(self.rollout.returns[used], valid)  # pyright: ignore[reportCallIssue]


def _rows(tree: Any, rows: slice) -> Any:
    return tree_map(lambda leaf: leaf[rows], tree)
