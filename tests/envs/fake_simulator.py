"""A simulator family that canter does not know, with its adapter and its registration: all a user has to write."""

import torch
from gymnasium import spaces

from canter.envs import StepRecord, VecEnv, register_adapter, register_env


class Arena:
    """Worlds with a puck each: `advance` moves the pucks; a puck that reaches 1 starts again at 0."""

    def __init__(self, task, num_worlds):
        self.task, self.num_worlds, self.x = task, num_worlds, torch.zeros(num_worlds, 1)

    def advance(self, push):
        reached = self.x + 0.1 * push.clamp(-1, 1)
        self.x = torch.where(reached >= 1, 0.0, reached)
        return reached


class ArenaEnv(VecEnv):
    def __init__(self, arena, device=None, seed=None, obs_groups=None):
        self.arena, self.num_envs, self.device = arena, arena.num_worlds, torch.device("cpu")
        self.obs_space = self.critic_obs_space = spaces.Box(-10.0, 1.0, (1,))
        self.action_space = spaces.Box(-1.0, 1.0, (1,))

    def reset(self):
        self.arena.x.zero_()
        return self.get_observations()

    def get_observations(self):
        obs = self.arena.x.clone()
        return obs, obs

    def step(self, actions):
        final = self.arena.advance(actions)
        obs, done, reward = self.arena.x.clone(), final[:, 0] >= 1, final[:, 0]
        return StepRecord(obs, obs, reward, done, torch.zeros_like(done), final, final, torch.ones_like(done), {})


register_adapter("Arena", lambda env: isinstance(env, Arena), ArenaEnv, "a fake_simulator.Arena")
register_env("arena", lambda task, num_envs, **options: Arena(task, num_envs))
