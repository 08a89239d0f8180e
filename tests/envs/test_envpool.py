import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from canter.envs.gymnasium_vector import EnvPoolAdapter, direct_halves, is_envpool
from canter.envs.wrap import wrap_env

envpool = pytest.importorskip("envpool")


def make(name, num_envs=4, **options):
    return EnvPoolAdapter(envpool.make(name, env_type="gymnasium", num_envs=num_envs, num_threads=1, **options))


def test_envpool_is_recognised_without_importing_it():
    env = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2, num_threads=1)
    assert is_envpool(env)
    assert not is_envpool(object())
    assert type(wrap_env(env)) is EnvPoolAdapter


def test_cartpole_masks_the_step_after_an_end():
    env = make("CartPole-v1", seed=3)
    env.reset()
    generator = torch.Generator().manual_seed(0)
    was_done = torch.zeros(4, dtype=torch.bool)
    num_ends = 0
    for _ in range(200):
        record = env.step(torch.randint(2, (4,), generator=generator))
        assert record.valid.tolist() == (~was_done).tolist()
        assert (env.elapsed_steps > 0).tolist() == record.valid.tolist()
        if was_done.any():
            assert record.obs[was_done].abs().max() <= 0.05
            assert record.reward[was_done].tolist() == [0.0] * int(was_done.sum())
            assert not record.done[was_done].any()
        if record.done.any():
            assert record.final_obs[record.done].abs().amax(1).min() > 0.05
        was_done = record.done
        num_ends += int(was_done.sum())
    assert num_ends > 10
    assert env.max_episode_length == 500
    assert env.has_invalid_steps


def test_a_step_has_two_halves_and_uses_no_more_threads_than_cores(monkeypatch):
    env = make("CartPole-v1", seed=3)
    env.reset()
    assert env.overlaps
    env.send(torch.ones(4, dtype=torch.long))
    assert env.recv().reward.tolist() == [1.0] * 4
    for cores, threads in ((1, 1), (3, 3), (64, 4)):
        monkeypatch.setattr("canter.envs.gymnasium_vector.usable_cores", lambda cores=cores: cores)
        assert wrap_env("envpool/CartPole-v1", num_envs=4).env.config["num_threads"] == threads


@pytest.mark.parametrize("name", ["CartPole-v1", "HalfCheetah-v5"])
def test_direct_envpool_calls_return_the_same_as_send_and_recv(name, monkeypatch):
    direct = make(name, seed=3)
    monkeypatch.setattr("canter.envs.gymnasium_vector.direct_halves", lambda env, num_envs: None)
    public = make(name, seed=3)
    assert public._begin == public.env.send != direct._begin
    assert torch.equal(direct.reset()[0], public.reset()[0])
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        shape = (4, *direct.action_space.shape)
        actions = torch.randint(2, shape, generator=generator) if name == "CartPole-v1" else torch.rand(shape)
        ours, theirs = direct.step(actions), public.step(actions)
        for part in ("obs", "reward", "terminated", "truncated", "valid"):
            assert torch.equal(getattr(ours, part), getattr(theirs, part)), part
        assert torch.equal(direct.elapsed_steps, public.elapsed_steps)
        mine, other = ours.extras["infos"], theirs.extras["infos"]
        assert mine.keys() == other.keys()
        np.testing.assert_equal(mine, other)


def test_unusual_environments_go_through_envpools_own_functions():
    env = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2, num_threads=1)
    keys, spec = env._state_keys, env.spec
    kind = {"_send": env._send, "_recv": env._recv, "_state_keys": keys, "spec": spec}
    assert direct_halves(SimpleNamespace(**kind), 2) is not None
    many = SimpleNamespace(action_array_spec={**spec.action_array_spec, "second": None})
    odd = {"_recv": None, "_state_keys": [*keys, "info:a.b"], "spec": many}
    for name, value in odd.items():
        assert direct_halves(SimpleNamespace(**{**kind, name: value}), 2) is None, name
    named = [key.replace("obs", "obs:image") for key in keys]
    assert direct_halves(SimpleNamespace(**{**kind, "_state_keys": named}), 2) is None


def test_pendulum_is_cut_off_not_terminated():
    env = make("Pendulum-v1", 2)
    env.reset()
    records = [env.step(torch.full((2, 1), 9.0)) for _ in range(202)]
    assert [r.truncated.any().item() for r in records[198:]] == [False, True, False, False]
    assert not any(r.terminated.any() for r in records)
    assert [r.valid.all().item() for r in records[198:]] == [True, True, False, True]
    assert records[0].obs.shape == (2, 3)


def test_half_cheetah_takes_and_gives_the_right_dtypes():
    env = make("HalfCheetah-v5", 2)
    obs, critic_obs = env.reset()
    assert obs.dtype == torch.float32
    assert critic_obs is obs
    assert env.action_space.dtype == np.float64
    record = env.step(torch.full((2, 6), 50.0))
    assert record.reward.dtype == torch.float32
    assert record.obs.shape == (2, 17)
    # Six actions clipped to 1 cost 0.1 each; unclipped they would cost 1500.
    assert record.reward.min() > -5
    before = record.obs.clone()
    env.step(torch.zeros(2, 6))
    assert torch.equal(record.obs, before)


def test_partial_batches_and_other_apis_are_refused():
    with pytest.raises(ValueError, match="returns 2 of 4 environments per step"):
        make("CartPole-v1", batch_size=2)
    with pytest.raises(TypeError, match='make it with env_type="gymnasium"'):
        EnvPoolAdapter(envpool.make("CartPole-v1", env_type="dm", num_envs=2))
    with pytest.raises(NotImplementedError, match=r"envpool.make\(..., seed=5\)"):
        make("CartPole-v1").seed(5)


def test_names_reach_envpool():
    env = wrap_env("envpool/CartPole-v1", num_envs=3, seed=1)
    again = wrap_env("envpool/CartPole-v1", num_envs=3, seed=1)
    assert torch.equal(env.reset()[0], again.reset()[0])
    assert env.num_envs == 3


@pytest.mark.slow
def test_a_playground_robot_has_privileged_observations():
    env = make("Go1JoystickFlatTerrain-v1", 2)
    obs, critic_obs = env.reset()
    assert obs.shape == (2, 48)
    assert critic_obs.shape == (2, 123)
    record = env.step(torch.zeros(2, 12))
    assert record.critic_obs.dtype == torch.float32


def test_a_robot_is_filmed_by_the_camera_that_follows_it():
    program = """
from canter.envs.gymnasium_vector import load_egl, make_envpool
reason = load_egl()
if reason is not None:
    raise SystemExit(f"skip: {reason}")
env = make_envpool("Go1JoystickFlatTerrain-v1", 1, "cpu", 1, "rgb_array")
env.reset()
picture = env.render()
print(env.metadata["render_fps"], picture.shape, picture.dtype, picture.std() > 10)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)  # before envpool is imported
    if "skip:" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout.split("\n")[-2] == "50 (480, 480, 3) uint8 True", done.stderr


def test_envpool_does_not_render_without_the_systems_egl(monkeypatch):
    monkeypatch.setattr("canter.envs.gymnasium_vector.load_egl", lambda: "no libEGL.so.1")
    with pytest.raises(ImportError, match=r"EnvPool cannot render here: no libEGL\.so\.1"):
        wrap_env("envpool/CartPole-v1", num_envs=1, render_mode="rgb_array")
    assert wrap_env("envpool/CartPole-v1", num_envs=1).render() is None


def test_a_model_without_cameras_is_shown_from_a_fixed_one():
    env = make("CartPole-v1", num_envs=1)
    asked = []

    def render(camera_id):
        asked.append(camera_id)
        if camera_id == 0:
            raise IndexError("camera_id is out of range")
        return np.zeros((1, 4, 6, 3), np.uint8)

    env.env = SimpleNamespace(render_mode="rgb_array", render=render)
    assert env.render().shape == env.render().shape == (4, 6, 3)
    assert asked == [0, -1, -1]
