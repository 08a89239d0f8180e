"""The environment as st_rl's demonstration savers see it."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from canter.envs.vec_env import StepRecord
from canter.envs.wrappers import VecEnvWrapper


class SaverStep(StepRecord):
    """A step record that unpacks to (obs, critic_obs, rewards, dones, infos)."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.obs, self.critic_obs, self.reward, self.done | ~self.valid, self.extras))


class SaverEnv(VecEnvWrapper):
    """Steps that unpack to five values, as `get_transition` of a saver's subclass may take them."""

    newest: SaverStep | None = None
    """The last step."""

    def step(self, actions: Tensor) -> SaverStep:
        """Apply one action per environment."""
        self.newest = tuple.__new__(SaverStep, super().step(actions))
        return self.newest
