"""Extensions of PPO: objects with hooks that add stored fields, rewards, loss terms and learning of their own."""

from collections.abc import Mapping
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

    Hooks of construction and saving run on the host, as do those whose description ends with "Host". The others are
    pure tensor code: they are recorded on a CPU and captured on a GPU, so they must not read numbers from the device or
    depend on Python state that changes.

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
    storage_class: ClassVar[type[RolloutStorage]] = RolloutStorage
    """Kind of rollout storage that is needed."""
    needs_next_obs: ClassVar[bool] = False
    """Whether `bonus` reads the observation after the step."""
    optimizer: Any = None
    """A `GuardedOptimizer` that takes a step on the total loss together with the policy's."""
    learns_separately: bool = False
    """Whether `learn` minimises the late terms, so that they are not part of the total loss."""
    uses_rewards: bool = True
    """Whether returns and PPO's own losses are needed."""
    alg: Any

    def __init__(self, cfg: Any = None, **given: Any) -> None:
        self.cfg = self.settings_class(**given) if cfg is None else cfg

    @classmethod
    def adjust_config(cls, cfg: Any) -> None:
        """Change the algorithm's own copy of the config before anything is built from it."""

    def is_enabled(self) -> bool:
        """Whether the settings switch the extension on; one that is off is dropped."""
        return True

    def separately_clipped(self, policy: Any) -> list[str]:
        """Names of parts of the policy whose gradients are clipped by a norm of their own."""
        return []

    def excluded_parameters(self, policy: Any) -> list[str]:
        """Names of parts of the policy that the policy's optimizer does not train."""
        return []

    def attach(self, alg: Any) -> None:
        """Build networks, random streams and loss weights; the policy and its optimizer exist."""
        self.alg = alg

    def storage_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the storage."""
        return {}

    def declare_fields(self) -> dict[str, Field]:
        """More to store per step; values come from `after_act` or `record_fields` under the same name."""
        return {}

    def begin(self, storage: RolloutStorage) -> None:
        """Allocate what depends on the number of environments; the storage was just made."""

    def after_act(self, step: dict[str, Any], obs: Obs, critic_obs: Obs) -> None:
        """Add to, or replace entries of, the step that acting began."""

    def record_fields(self, record: StepRecord) -> dict[str, Tensor]:
        """Tensors to keep from what the environment returned; later hooks find them in `record.extras`. Host."""
        return {}

    def reward(self, reward: Tensor, record: StepRecord) -> Tensor:
        """(N,) the reward to learn from, before it is normalised."""
        return reward

    def bonus(self, record: StepRecord) -> Tensor | None:
        """(N,) a reward added after normalisation."""
        return None

    def after_record(self, record: StepRecord) -> None:
        """Update memories of the extension's own after a step."""

    def end_episodes(self) -> None:
        """Clear memories of the extension's own, because every environment begins a new episode. Host."""

    def step_metrics(self) -> dict[str, float]:
        """Entries of `infos["log"]` after `process_env_step`. Host."""
        return {}

    def begin_update(self, iteration: int) -> None:
        """Set what depends on the iteration. Host."""

    def recording_key(self) -> tuple[Any, ...]:
        """Python values that decide what the hooks compute; another value gets another recording. Host."""
        return ()

    def before_forward(self, batch: MiniBatch) -> None:
        """Change a minibatch before the policy's pass over it."""

    def loss_terms(self, terms: Terms, batch: MiniBatch, out: PolicyOutput) -> None:
        """Add losses and statistics to the terms."""

    def late_terms(self, terms: Terms) -> None:
        """Add losses that cannot be compiled, such as a gradient penalty, from `terms.inter_vars`."""

    def learn(self, terms: Terms) -> Terms | None:
        """Take a step of an optimizer of its own after the policy's; its losses and statistics."""
        return None

    def end_update(self, rollout: RolloutStorage) -> None:
        """Update statistics once per iteration, before the rollout is cleared. Host."""

    def metrics(self) -> dict[str, Tensor]:
        """Device scalars to report once per iteration."""
        return {}

    def checkpoint_parts(self) -> dict[str, Any]:
        """Name in the checkpoint -> the object whose state is saved."""
        return {}

    def resume_state(self) -> dict[str, Any]:
        """State that exact continuation needs beyond what was learned."""
        return {}

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from `resume_state`."""


def overrides(extension: Extension, hook: str) -> bool:
    """Whether an extension implements a hook."""
    return getattr(type(extension), hook) is not getattr(Extension, hook)
