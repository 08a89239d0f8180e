"""Extensions of PPO: objects with hooks that add stored fields, rewards, loss terms and learning of their own."""

from collections.abc import Collection, Hashable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from canter.algorithms.algorithm import Terms
from canter.envs.vec_env import StepRecord
from canter.modules.policy import PolicyOutput
from canter.storage.rollout_storage import Field, MiniBatch, RolloutStorage
from canter.utils.config import settings
from canter.utils.tree import Obs


@settings
class NoSettings:
    """Settings of an extension that has none."""


class Extension:
    """Base of everything that rides along with PPO. Every hook is optional; they run in the order of `extensions`.

    The hooks `after_act`, `record`, `reset`, `reward`, `bonus`, `returns`, `before_forward`, `losses` and `learn` are
    tensor code: they are recorded on a CPU and captured on a GPU, so they must not read numbers from the device or
    change Python objects. The others are ordinary Python.

    `PPO(policy, extensions=[Mine(mine_coef=0.1)])` uses one; a class attribute `extension_classes = (Mine,)` of an
    algorithm makes its settings keywords, YAML entries and flags of that algorithm.

    Args:
        cfg: A config that has the extension's settings; the algorithm's own where its class names the extension.
        **given: The settings, where there is no config.
    """

    name: ClassVar[str]
    """Key in `alg.extensions`; `alg.<name>` gives the extension."""
    settings_class: ClassVar[type] = NoSettings
    """Dataclass of the settings; a loss `x` is weighted by the setting `x_coef`, or by 1."""
    switch: ClassVar[str] = ""
    """Setting that switches the extension on by not being None; without one it is always on."""
    storage_class: ClassVar[type[RolloutStorage]] = RolloutStorage
    """Kind of rollout storage that is needed."""
    extras: ClassVar[tuple[str, ...]] = ()
    """Entries of the environment's extras that `record` reads."""
    offered: ClassVar[tuple[str, ...]] = ()
    """Attributes that the algorithm offers too, as `alg.<name>`."""
    can_compile: bool = True
    """Whether `losses` can be compiled; a gradient of a gradient cannot."""
    own_losses: Collection[str] = ()
    """Names of the losses that `learn` minimises, so that they are not part of the total loss."""
    optimizer: Any = None
    """A `GuardedOptimizer` that takes a step on the total loss together with the policy's."""
    storage_options: Mapping[str, Any] = {}
    """Keyword arguments of the storage."""
    uses_rewards: bool = True
    """Whether returns and PPO's own losses are needed."""
    alg: Any

    def __init__(self, cfg: Any = None, **given: Any) -> None:
        self.cfg = self.settings_class(**given) if cfg is None else cfg

    # While the algorithm is built.
    @classmethod
    def adjust_config(cls, cfg: Any) -> None:
        """Change the algorithm's own copy of the config before anything is built from it."""

    def own_parameters(self, policy: Any) -> dict[str, list[str]]:
        """Parts of the policy by name that are treated apart.

        "separate" ones are clipped by a norm of their own, so that large gradients of an estimator do not slow the
        policy; "excluded" ones are not trained by the policy's optimizer, because the extension has one.
        """
        return {}

    def attach(self, alg: Any) -> None:
        """Build networks, random streams and loss weights; the policy and its optimizer exist."""
        self.alg = alg

    def fields(self) -> dict[str, Field]:
        """More to store per step; values come from `after_act` or `record` under the same name."""
        return {}

    def begin(self, storage: RolloutStorage) -> None:
        """Allocate what depends on the number of environments; the storage was just made."""

    # Per step.
    def after_act(self, step: dict[str, Any], obs: Obs, critic_obs: Obs) -> None:
        """Add to, or replace entries of, the step that acting began."""

    def record(self, record: StepRecord) -> dict[str, Tensor]:
        """Values of the extension's fields from what the environment returned; `record.extras` has the `extras`."""
        return {}

    def reset(self, ends: Tensor) -> None:
        """Clear memories of the extension's own in the environments (N,) whose episode ended."""

    # Per rollout.
    def reward(self, rewards: Tensor, rollout: RolloutStorage) -> Tensor:
        """(T, N) rewards to learn from, before they are scaled."""
        return rewards

    def bonus(self, rollout: RolloutStorage) -> Tensor | None:
        """(T, N) rewards to add after the scaling, with a scale of their own."""
        return None

    def returns(self, rollout: RolloutStorage, last_critic_obs: Obs, last_values: Tensor) -> None:
        """Change the stored returns and advantages; the last ones are of the states (N,) after the rollout."""

    # Per update.
    def begin_update(self, iteration: int) -> Hashable:
        """Set what depends on the iteration; returns the Python values that decide what the other hooks compute."""
        return ()

    def before_forward(self, batch: MiniBatch) -> None:
        """Change a minibatch before the policy's pass over it, such as the memories that it starts from."""

    def losses(self, terms: Terms, batch: MiniBatch, out: PolicyOutput) -> None:
        """Add losses and statistics to the terms."""

    def learn(self, terms: Terms) -> Terms | None:
        """Take a step of an optimizer of its own after the policy's; its losses and statistics."""
        return None

    def end_update(self, rollout: RolloutStorage) -> None:
        """Update statistics once per iteration, before the rollout is cleared."""

    def metrics(self) -> dict[str, Tensor]:
        """Device scalars to report once per iteration."""
        return {}

    # Saving.
    def checkpoint_parts(self) -> dict[str, Any]:
        """Name in the checkpoint -> the object whose state is saved."""
        return {}

    def resume_state(self) -> dict[str, Any]:
        """State that exact continuation needs beyond what was learned."""
        return {}

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from `resume_state`."""


class Offered:
    """An attribute of an extension as an attribute of the algorithm."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, alg: Any, owner: type | None = None) -> Any:
        if alg is None:
            return self
        for extension in alg.extensions.values():
            if self.name in extension.offered:
                return getattr(extension, self.name)
        raise AttributeError(f"{type(alg).__name__} has no attribute {self.name!r}")


def overrides(extension: Extension, hook: str) -> bool:
    """Whether an extension implements a hook."""
    return getattr(type(extension), hook) is not getattr(Extension, hook)
