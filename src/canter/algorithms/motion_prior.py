"""What learns the style of a motion: a discriminator with its optimizer, feature normaliser, expert data and replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.algorithms.imitation_settings import MotionPriorSettings
from canter.algorithms.optim import GuardedOptimizer, backward
from canter.modules.amp_discriminator import AMPDiscriminator
from canter.modules.normalizer import EmpiricalNormalization
from canter.storage.replay_buffer import ReplayBuffer

LARGEST_FEATURE = 10.0  # in standard deviations; one broken joint reading must not decide everything
PACE = 0.05  # weight of the newest minibatch in the running accuracy


class MotionPrior:
    """A policy's discriminator and everything its learning needs; the public methods are tensor code.

    Args:
        discriminator: The policy's.
        given: Its settings.
        learning_rate: Where its own rate starts if none is given.
        generator: Stream of expert and replay samples.
        device: Where everything is.
    """

    def __init__(
        self,
        discriminator: AMPDiscriminator,
        given: MotionPriorSettings,
        learning_rate: float,
        generator: torch.Generator,
        device: torch.device,
    ) -> None:
        self.discriminator, self.generator, self.device = discriminator, generator, device
        self.width = discriminator.input_dim
        self.limit, self.slow_down = given.discriminator_accuracy_limit, given.discriminator_slow_down
        self.max_grad_norm = given.discriminator_max_grad_norm
        names = ("policy", "expert") if given.separate_amp_normalizers else ("both",)
        self.normalizers = {name: EmpiricalNormalization([self.width], until=1e8).to(device) for name in names}
        self.optimizer: GuardedOptimizer | None = None
        if given.discriminator_optimizer == "own":
            decays = {"trunk": given.discriminator_weight_decay, "head": given.discriminator_head_weight_decay}
            present = {name.split(".")[0] for name, _ in discriminator.named_parameters()}
            groups = {part: {"weight_decay": decay} for part, decay in decays.items() if part in present}
            rate = given.discriminator_learning_rate or learning_rate
            self.optimizer = GuardedOptimizer(discriminator, "Adam", rate, groups)
        self.accuracy = torch.full((), 0.5, device=device)
        self.count = torch.zeros((), device=device)
        self.bank = expert_bank(given, self.width, device)
        size = given.amp_replay_buffer_size
        self.replay = ReplayBuffer((self.width + 1) // 2, size, device) if size else None
        self.has_past = torch.zeros((), dtype=torch.bool, device=device)

    # ------------------------------------------------------------------ features
    def normalized(self, features: Tensor, whose: str) -> Tensor:
        """(..., D) raw features of the policy or the expert, as the discriminator sees them."""
        normalizer = self.normalizers.get("both") or self.normalizers[whose]
        return normalizer.normalize(features).clamp(-LARGEST_FEATURE, LARGEST_FEATURE)

    def expert_rows(self, count: int) -> Tensor:
        """(count, D) windows from the loaded clips."""
        if self.bank is None:
            raise KeyError("the environment gives no 'ref_motion' in its extras; give it, or set amp_motion_loader")
        draws = torch.rand(count, generator=self.generator, device=self.device, dtype=torch.float64)
        return self.bank[(draws * len(self.bank)).long()]

    def observe(self, policy: Tensor, expert: Tensor, valid: Tensor) -> None:
        """Take a rollout (T, N, D) into the statistics, and its valid windows into the replay."""
        for whose, features, mask in (("policy", policy, valid), ("expert", expert, None)):
            (self.normalizers.get("both") or self.normalizers[whose]).update(features, mask)
        if self.replay is not None:
            rows = torch.nn.functional.pad(policy[valid], (0, self.width % 2))
            self.replay.insert(*rows.chunk(2, dim=-1))
            self.has_past.fill_(len(rows) > 0 or bool(self.has_past))

    # ------------------------------------------------------------------ learning
    def losses(self, expert: Tensor, policy: Tensor, valid: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The three losses on raw features (..., D), fresh and replayed, and how well it tells them apart."""
        expert, policy, valid = expert.reshape(-1, self.width), policy.reshape(-1, self.width), valid.reshape(-1)
        if self.replay is not None:
            past = torch.cat(self.replay.sample(len(policy), self.generator), -1)[:, : self.width]
            policy = torch.cat([policy, past])
            valid = torch.cat([valid, self.has_past.expand(len(past))])
        return self.discriminator.adversarial_losses(
            self.normalized(expert, "expert"), self.normalized(policy, "policy"), valid
        )

    def descend(self, loss: Tensor, accuracy: Tensor) -> dict[str, Tensor]:
        """One step of its own optimizer, left out now and then while it is too good."""
        assert self.optimizer is not None
        backward(loss, self.optimizer)
        norm, skipped = self.optimizer.clip(self.max_grad_norm)
        self.accuracy.lerp_(accuracy, PACE)
        self.count += 1
        paused = (self.accuracy > self.limit) & (self.count.remainder(self.slow_down) != 0)
        self.optimizer.apply(torch.maximum(skipped, paused.to(skipped.dtype)))
        return {"amp/grad_norm": norm, "amp/updates": 1.0 - paused.to(norm.dtype)}

    # ------------------------------------------------------------------ saving
    def parts(self) -> dict[str, Any]:
        """What of it is saved beside the policy."""
        names = {"both": "amp_norm", "policy": "ref_obs_norm", "expert": "ref_motion_norm"}
        parts: dict[str, Any] = {f"{names[name]}_state_dict": part for name, part in self.normalizers.items()}
        if self.optimizer is not None:
            parts["discriminator_optimizer_state_dict"] = self.optimizer
        return parts

    def state(self) -> dict[str, Any]:
        """What exact continuation needs besides."""
        state = {"accuracy": self.accuracy, "count": self.count}
        if self.replay is not None:
            kept = slice(0, self.replay.num_samples)
            state |= {"states": self.replay.states[kept], "next_states": self.replay.next_states[kept]}
        return {name: value.clone() for name, value in state.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.accuracy.copy_(state["accuracy"])
        self.count.copy_(state["count"])
        if self.replay is not None and "states" in state and len(state["states"]):
            self.replay.insert(state["states"].to(self.device), state["next_states"].to(self.device))
            self.has_past.fill_(True)


def expert_bank(given: MotionPriorSettings, width: int, device: torch.device) -> Tensor | None:
    """(M, D) expert windows from what `amp_motion_loader` says, None where the environment is to give them."""
    source = given.amp_motion_loader
    if source is None:
        return None
    if isinstance(source, Mapping):
        from canter.datasets.motion_loader import AMPLoader

        source = AMPLoader(**{"device": device, **source})
    if hasattr(source, "expert_features"):
        source = source.expert_features(given.amp_preload, given.amp_num_frames)
    bank = torch.as_tensor(source, dtype=torch.float32, device=device)
    if bank.dim() != 2 or bank.shape[1] != width or not len(bank):
        raise ValueError(f"expert windows have shape {tuple(bank.shape)}, the discriminator wants (M, {width})")
    return bank
