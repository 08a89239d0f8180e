"""Data collection for DAgger: the student acts, and every step is labelled with the teacher's action."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.algorithms.schedules import GET_PROB_FUNC, Schedule
from canter.compat.checkpoints import import_state, known_settings
from canter.modules.build import POLICIES, build_actor_critic, build_pair, install_normalizers
from canter.modules.policy import Policy
from canter.runners.demonstration import DemonstrationSaver
from canter.runners.heartbeat import Heartbeat
from canter.runners.run_config import named_network
from canter.utils.checkpoint import CheckpointError, find_checkpoints, load_checkpoint
from canter.utils.reading import read_json, read_yaml, refuse_imports

CONFIG_NAMES = ("config.yaml", "config.json")
COLLECTOR_FILE, TRAINER_FILE = ".collector-alive", ".trainer-alive"  # in the data, and in the student's run directory


class DaggerSaver(DemonstrationSaver):
    """Runs the student, or with some probability the teacher, and labels every step with the teacher's action.

    `policy` is the teacher. The student is the newest checkpoint in the run directory of its training.

    Args:
        training_policy_logdir: The student's run directory, with its config and `model_<iteration>.pt`.
        teacher_act_prob: Probability that the teacher acts in an environment, as a schedule over the student's
            iterations: "exp", "linear", "tanh", a number, or a function.
        update_times_scale: Iterations over which the schedule decays.
        action_sample_std: Standard deviation of the student's noise; its own if 0.
        log_to_tensorboard: Write episode statistics to TensorBoard in `save_dir`.
        stop_when_alone: Stop collecting when the process that trains the student is gone.
    """

    def __init__(
        self,
        *args: Any,
        training_policy_logdir: str | Path,
        teacher_act_prob: str | float | Schedule = "exp",
        update_times_scale: float = 5000,
        action_sample_std: float = 0.0,
        log_to_tensorboard: bool = False,
        stop_when_alone: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.training_policy_logdir = Path(training_policy_logdir)
        self.teacher_act_prob = GET_PROB_FUNC(teacher_act_prob, update_times_scale)
        self.update_times_scale, self.action_sample_std = update_times_scale, action_sample_std
        self.metadata |= {"update_times_scale": update_times_scale, "action_sample_std": action_sample_std}
        self.metadata["training_policy_logdir"] = os.path.relpath(training_policy_logdir, self.save_dir)
        partner = self.training_policy_logdir / TRAINER_FILE
        self.heartbeat = Heartbeat(self.save_dir / COLLECTOR_FILE, partner, "trainer", stop_when_alone)
        self.training_policy: Policy | None = None
        self.training_policy_iteration = self.collection_iteration = 0
        self.use_teacher_act_mask = torch.ones(self.env.num_envs, dtype=torch.bool, device=self.env.device)
        self.rollout_episode_infos: list[Mapping[str, Any]] = []
        self.tb_writer: Any = None
        self._has_warned = False
        if log_to_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.tb_writer = SummaryWriter(str(self.save_dir))

    def init_traj_handlers(self) -> None:
        """Build the student and open the directory."""
        if self.training_policy is None:
            self.build_training_policy()
        super().init_traj_handlers()

    def build_training_policy(self) -> None:
        """Build an untrained student from the config in its run directory."""
        directory = self.training_policy_logdir
        path = next((directory / name for name in CONFIG_NAMES if (directory / name).is_file()), None)
        if path is None:
            names = " or ".join(CONFIG_NAMES)
            raise FileNotFoundError(f"{directory} has no {names}: start the student's training first")
        config = (read_json if path.suffix == ".json" else read_yaml)(path, root=directory)
        refuse_imports(config.get("policy"), path, (), "build the student and assign it to training_policy")
        settings = dict(config.get("policy") or {})
        runner = config.get("runner") or {}
        name = settings.pop("class_name", None) or runner.get("policy_class_name") or config.get("policy_class_name")
        if "actor_class" in settings:
            classes = (named_network(settings["actor_class"]), named_network(settings["critic_class"]))
            spaces = (self.env.obs_space, self.env.critic_obs_space, self.env.action_space)
            student: Policy = build_pair(*spaces, *classes, settings.get("actor_cfg"), settings.get("critic_cfg"))
        else:
            name = name or "ActorCritic"
            settings = known_settings(POLICIES[name], settings, path) if name in POLICIES else settings
            student = build_actor_critic(self.env, name, settings)
        self.training_policy = student.to(self.env.device).eval()
        self.training_policy_iteration = 0
        self._set_noise()

    def load_latest_training_policy(self) -> None:
        """Load the newest checkpoint of the student, and draw the environments in which the teacher acts."""
        if self.training_policy is None:
            self.build_training_policy()
        found = find_checkpoints(self.training_policy_logdir) if self.training_policy_logdir.is_dir() else []
        if not found and not self._has_warned:
            self._has_warned = True
            directory = self.training_policy_logdir
            warnings.warn(f"no model_<iteration>.pt in {directory} yet: an untrained student acts", stacklevel=2)
        for number, path in reversed(found):
            if number <= self.training_policy_iteration or self._load_student(path):
                break
        chance = torch.rand(self.env.num_envs, device=self.env.device)
        self.use_teacher_act_mask = chance < self.teacher_act_prob(self.training_policy_iteration)

    def _load_student(self, path: Path) -> bool:
        """Load a checkpoint; returns False if the file is incomplete or has just been removed."""
        try:
            state = import_state(load_checkpoint(path, self.env.device))
        except (CheckpointError, OSError) as error:
            warnings.warn(f"the student in {path.name} cannot be read yet: {error}", stacklevel=3)
            return False
        student, weights = self.training_policy, state["model_state_dict"]
        assert student is not None
        install_normalizers(student, weights)
        student.to(self.env.device).eval()
        student.load_state_dict(weights)
        self.training_policy_iteration = int(state.get("iter", 0))
        self._set_noise()
        return True

    def _set_noise(self) -> None:
        if self.action_sample_std <= 0 or self.training_policy is None:
            return
        with torch.no_grad():
            for name, value in (("std", self.action_sample_std), ("log_std", np.log(self.action_sample_std))):
                noise = getattr(self.training_policy, name, None)
                if isinstance(noise, torch.nn.Parameter):
                    noise.fill_(float(value))

    def choose_actions(self) -> tuple[Tensor, Tensor]:
        """The teacher's actions as labels; the student's to execute, except where the teacher acts."""
        if self.training_policy is None:
            self.load_latest_training_policy()
        labels = self.get_policy_actions()
        actions = self._act(self.training_policy, self.obs, by_sample=True)
        mask = self.use_teacher_act_mask.view(-1, *[1] * (labels.dim() - 1))
        return labels, torch.where(mask, labels, actions.to(labels.dtype))

    def add_transition(self, step_i: int, infos: Mapping[str, Any]) -> None:
        """Store the step and the environment's episode statistics."""
        super().add_transition(step_i, infos)
        if infos.get("episode"):
            self.rollout_episode_infos.append(infos["episode"])

    def policy_reset(self, dones: Tensor) -> None:
        """Reset the memory of both policies where episodes ended."""
        super().policy_reset(dones)
        if self.training_policy is not None and bool(dones.any()):
            self.training_policy.reset(dones)

    def check_stop(self) -> bool:
        """Load a newer student if there is one; stop if enough was collected, or if the trainer is gone."""
        self.load_latest_training_policy()
        return self.heartbeat.is_over() or super().check_stop()

    def collect_and_save(self, config: Mapping[str, Any] | None = None) -> None:
        """Collect until `check_stop` or a stop signal; all steps are then on disk."""
        with self.heartbeat:
            super().collect_and_save(config)

    def log_metrics(self) -> dict[str, float]:
        """Episode statistics since the last call: the largest of `_max`, the smallest of `_min`, means of others."""
        self.collection_iteration += 1
        infos, self.rollout_episode_infos = self.rollout_episode_infos, []
        merged: dict[str, float] = {}
        for name in dict.fromkeys(name for info in infos for name in info):
            values = [torch.as_tensor(info[name]).cpu().double().reshape(-1) for info in infos if name in info]
            numbers = torch.cat(values).detach().numpy()
            reduce = {"_max": np.nanmax, "_min": np.nanmin}.get(name[-4:], np.nanmean)
            value = float(reduce(numbers)) if np.isfinite(numbers).any() else float("nan")
            merged[f"Episode/{name}"] = value
            if self.tb_writer is not None:
                self.tb_writer.add_scalar(f"Episode/{name}", value, self.training_policy_iteration)
        teacher = float(self.use_teacher_act_mask.float().mean())
        own = {"train/student_iteration": float(self.training_policy_iteration), "train/teacher_drives": teacher}
        return {**super().log_metrics(), **own, **merged}

    def close(self) -> None:
        """Close the directory and the TensorBoard log."""
        super().close()
        if getattr(self, "tb_writer", None) is not None:
            self.tb_writer.close()
