"""Checks that need a GPU: captured steps, and no step that waits for the device."""

import gymnasium
import pytest
import torch
from gymnasium import spaces

from canter.compat.batched_envs import RslRlAdapter
from canter.envs.dummy import DummyVecEnv
from canter.envs.gymnasium import GymVecEnv
from canter.envs.records import EndWatch, step_record
from canter.envs.torch_envs import TORCH_ENVS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EVERY = pytest.mark.parametrize("name", sorted(TORCH_ENVS))


def some_action(env):
    if isinstance(env.action_space, spaces.Discrete):
        return torch.arange(env.num_envs, device=env.device) % env.num_actions
    return torch.linspace(-1, 1, env.num_envs * env.num_actions, device=env.device).view(env.num_envs, -1)


@pytest.fixture
def no_waiting():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@EVERY
def test_a_captured_step_does_what_an_eager_one_does(name):
    eager, captured = (TORCH_ENVS[name](64, "cuda", seed=0, max_episode_length=5) for _ in range(2))
    action, state = some_action(eager), captured.get_state()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.step(action)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(captured.generator)
    with torch.cuda.graph(graph):
        record = captured.step(action)
    captured.set_state(state)
    for _ in range(12):
        graph.replay()
        other = eager.step(action)
        torch.testing.assert_close(record.obs, other.obs)
        torch.testing.assert_close(record.final_critic_obs, other.final_critic_obs)
        torch.testing.assert_close(record.reward, other.reward)
        assert torch.equal(record.done, other.done)
    assert torch.equal(captured.episode_length_buf, eager.episode_length_buf)


@EVERY
def test_no_step_waits_for_the_device(name, request):
    env = TORCH_ENVS[name](64, "cuda", seed=0, max_episode_length=3)
    action = some_action(env)
    request.getfixturevalue("no_waiting")
    for _ in range(5):
        record = env.step(action)
        step_record(record.obs, record.critic_obs, record.reward, record.done, record.extras)


def test_the_null_environment_never_waits(request):
    env = DummyVecEnv(64, device="cuda", num_privileged_obs=9)
    action = some_action(env)
    request.getfixturevalue("no_waiting")
    for _ in range(3):
        env.step(action)


def test_an_rsl_rl_environment_never_waits(third, request):
    env = third()
    env.device = "cuda"
    env.t, env.lengths = env.t.cuda(), env.lengths.cuda()
    index = torch.arange(3, device="cuda")
    env.__class__ = type("Cuda", (third,), {"obs": property(lambda e: (100 * index + e.t).unsqueeze(1).repeat(1, 4))})
    done = torch.ones(3, dtype=torch.bool, device="cuda")
    env.advance = lambda: (env.t.clone(), done, (env.obs, env.critic))
    adapter = RslRlAdapter(env)
    action = torch.zeros(3, 2, device="cuda")
    request.getfixturevalue("no_waiting")
    for _ in range(3):
        assert adapter.step(action).final_obs.is_cuda


def test_an_end_watch_does_not_wait_for_the_device():
    watch = EndWatch(torch.device("cuda"))
    mask = torch.tensor([False, True], device="cuda")
    assert not watch(~mask & mask)
    watch(mask)
    torch.cuda.synchronize()
    assert watch(~mask & mask)


def test_gymnasium_environments_feed_a_gpu_learner():
    env = GymVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2, "cuda", seed=0)
    host = GymVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2, "cpu", seed=0)
    assert torch.equal(env.reset()[0].cpu(), host.reset()[0])
    for _ in range(30):
        record, other = env.step(torch.ones(2, device="cuda")), host.step(torch.ones(2))
        assert record.obs.is_cuda
        assert record.terminated.is_cuda
        assert torch.equal(record.obs.cpu(), other.obs)
        assert (record.final_obs is None) == (other.final_obs is None)
