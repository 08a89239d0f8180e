import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.compat.batched_envs import RslRlAdapter, is_batched, join_groups, resolve_sets
from canter.envs.check import check_env
from canter.envs.records import take_groups

ACTION = torch.zeros(3, 2)
A, B, C = torch.full((2, 1), 1.0), torch.full((2, 2), 2.0), torch.full((2, 3), 3.0)
IMAGE = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)


def run(env, num_steps=6):
    adapter = RslRlAdapter(env)
    adapter.reset()
    return adapter, [adapter.step(ACTION) for _ in range(num_steps)]


def test_second_version_gives_critic_observations_in_its_extras(second):
    adapter, records = run(second())
    assert adapter.num_obs == 4
    assert adapter.num_privileged_obs == 2
    assert records[0].obs[:, 0].tolist() == [1, 101, 201]
    assert records[0].critic_obs[:, 0].tolist() == [-1, -101, -201]
    assert records[1].truncated.tolist() == [True, False, False]
    assert records[1].obs[:, 0].tolist() == [0, 102, 202]
    assert records[1].reward.tolist() == [2, 102, 202]
    assert adapter.max_episode_length == 10


def test_a_missing_critic_group_is_the_actors_observation(second):
    class Symmetric(second):
        def get_observations(self):
            return self.obs, {"observations": {}}

        def step(self, actions):
            obs, reward, done, _ = super().step(actions)
            return obs, reward, done, {}

    adapter, records = run(Symmetric())
    assert records[0].critic_obs is records[0].obs
    assert adapter.critic_obs_space is adapter.obs_space
    assert adapter.num_privileged_obs is None
    assert records[1].terminated.tolist() == [True, False, False]


def test_first_second_and_third_version_give_the_same_tensors(legacy, second, third):
    runs = [run(kind())[1] for kind in (legacy, second, third)]
    for first, *others in zip(*runs, strict=True):
        for other in others:
            for name in ("obs", "critic_obs", "reward", "terminated", "truncated", "valid"):
                assert torch.equal(getattr(first, name), getattr(other, name)), name


def test_the_rsl_rl_version_is_recognised(legacy, second, third):
    assert [run(kind(), 1)[0].contract.removeprefix("rsl_rl style, ") for kind in (legacy, second, third)] == [
        "1.x (5-tuple)",
        "2.x (observation and extras)",
        "3.x and later (observation groups)",
    ]


def test_legacy_environments_may_give_privileged_observations_by_a_call(legacy):
    class Calls(legacy):
        def reset(self):
            return super().reset()[0]

        def get_privileged_observations(self):
            return self.critic

    adapter, records = run(Calls())
    assert adapter.num_privileged_obs == 2
    assert records[0].critic_obs[:, 0].tolist() == [-1, -101, -201]


def test_legacy_environments_without_privileged_observations_give_none(legacy):
    class Symmetric(legacy):
        num_privileged_obs = None

        def reset(self):
            return self.obs, None

        def get_privileged_observations(self):
            return None

        def step(self, actions):
            obs, _, *rest = super().step(actions)
            return obs, None, *rest

    _, records = run(Symmetric())
    assert records[2].critic_obs is records[2].obs


def test_a_privileged_observation_of_width_zero_is_none(second):
    class Empty(second):
        num_privileged_obs = 0
        critic = torch.zeros(3, 0)

    adapter, records = run(Empty())
    assert adapter.num_privileged_obs is None
    assert records[0].critic_obs is records[0].obs


def test_third_version_final_observations_reach_actor_and_critic(third):
    adapter, records = run(third())
    assert records[1].final_obs[0].tolist() == [2, 2, 2, 2]
    assert records[1].final_critic_obs[0].tolist() == [-2, -2]
    assert records[1].obs[0].tolist() == [0, 0, 0, 0]
    assert adapter.gives_final_obs


def test_actor_is_another_name_of_policy(third):
    class Mjlab(third):
        names = ("actor", "critic")

    _, records = run(Mjlab())
    assert records[1].critic_obs[1].tolist() == [-102, -102]
    assert records[1].final_obs[0, 0] == 2


def test_tensordicts_are_groups(third):
    tensordict = pytest.importorskip("tensordict")

    class Dicts(third):
        def groups(self, obs, critic):
            return tensordict.TensorDict({"policy": {"a": obs, "b": critic}, "critic": critic}, batch_size=[3])

    adapter, records = run(Dicts())
    assert type(records[0].obs) is torch.Tensor
    assert records[0].obs[1].tolist() == [101] * 4 + [-101] * 2
    assert adapter.obs_segments == {"a": (4,), "b": (2,)}
    assert records[1].final_obs[0].tolist() == [2] * 4 + [-2] * 2


def test_apexrl_mappings_have_their_own_names(third):
    class Apex(third):
        names = ("obs", "privileged_obs")
        num_actions = None
        action_space_gym = spaces.Discrete(4)

        def reset(self):
            self.num_resets += 1
            return self.get_observations()

    adapter, records = run(Apex())
    assert adapter.action_space == spaces.Discrete(4)
    assert adapter.num_actions == 4
    assert records[0].critic_obs[2].tolist() == [-201, -201]
    assert records[1].final_critic_obs[0].tolist() == [-2, -2]


def test_apexrl_dict_observations_stay_dicts(third):
    class Nested(third):
        def groups(self, obs, critic):
            return {"obs": {"joint": obs, "image": torch.zeros(3, 1, 4, 4, dtype=torch.uint8)}}

    adapter, records = run(Nested())
    assert records[0].obs["joint"][1, 0] == 101
    assert records[0].obs["image"].dtype == torch.uint8
    assert records[1].final_obs["joint"][0, 0] == 2
    assert adapter.obs_space["image"].dtype == np.uint8


def test_a_mapping_without_known_names_is_one_observation(third):
    class Plain(third):
        names = ("left", "right")

    _, records = run(Plain())
    assert sorted(records[0].obs) == ["left", "right"]
    assert records[0].critic_obs is records[0].obs


def test_obs_groups_are_concatenated(third):
    class Many(third):
        def groups(self, obs, critic):
            return {"policy": obs, "critic": critic, "terrain": obs[:, :1] + 0.5}

    adapter = RslRlAdapter(Many(), obs_groups={"actor": ["policy", "terrain"], "critic": ["critic", "policy"]})
    record = adapter.step(ACTION)
    assert record.obs[1].tolist() == [101] * 4 + [101.5]
    assert record.critic_obs[1].tolist() == [-101] * 2 + [101] * 4
    assert adapter.obs_segments == {"policy": (4,), "terrain": (1,)}
    assert adapter.critic_obs_segments == {"critic": (2,), "policy": (4,)}
    second = adapter.step(ACTION)
    assert second.final_obs[0].tolist() == [2] * 4 + [2.5]
    assert second.final_critic_obs[0].tolist() == [-2, -2, 2, 2, 2, 2]
    assert record.extras["observations"]["terrain"].tolist() == [[1.5], [101.5], [201.5]]
    with pytest.raises(KeyError, match="names the group 'heights'"):
        RslRlAdapter(Many(), obs_groups={"actor": ["heights"]})


def test_an_image_group_makes_a_dict(third):
    class Visual(third):
        def groups(self, obs, critic):
            return {"policy": obs, "critic": critic, "camera": torch.zeros(3, 1, 4, 4, dtype=torch.uint8)}

    adapter = RslRlAdapter(Visual(), obs_groups={"actor": ["policy", "camera"]})
    record = adapter.step(ACTION)
    assert sorted(record.obs) == ["camera", "policy"]
    assert record.obs["camera"].dtype == torch.uint8
    assert record.critic_obs.shape == (3, 2)


def test_observations_are_requested_once(second, legacy):
    env = second()
    adapter = RslRlAdapter(env)
    adapter.reset()
    adapter.get_observations()
    adapter.get_observations()
    adapter.step(ACTION)
    adapter.get_observations()
    assert env.num_gets == 1
    env = legacy()
    adapter = RslRlAdapter(env)
    adapter.reset()
    adapter.get_observations()
    assert env.num_resets == 1
    adapter.step(ACTION)
    assert adapter.get_observations()[0][:, 0].tolist() == [1, 101, 201]
    obs, _ = adapter.reset()
    assert env.num_resets == 2
    assert obs[:, 0].tolist() == [0, 100, 200]


def test_an_environment_without_reset_goes_on_and_says_so(second):
    adapter = RslRlAdapter(second())
    adapter.step(ACTION)
    with pytest.warns(UserWarning, match=r"Second has no reset\(\): its episodes go on"):
        obs, _ = adapter.reset()
    assert obs[0, 0] == 1


class Reused:
    """Mixed into an environment: every answer is the same few tensors."""

    def step(self, actions):
        obs, reward, done, extras = super().step(actions)
        fresh = {"obs": obs, "reward": reward, "done": done, "critic": extras["observations"]["critic"]}
        if not hasattr(self, "kept"):
            self.kept = fresh
            self.extras = {"observations": {}, "ref_motion": torch.zeros(3)}
        for name, value in fresh.items():
            self.kept[name].copy_(value)
        self.extras["observations"]["critic"] = self.kept["critic"]
        self.extras["time_outs"] = self.kept["done"]
        self.extras["ref_motion"] += 1
        return self.kept["obs"], self.kept["reward"], self.kept["done"], self.extras


def test_buffers_of_the_environment_are_copied(second):
    class Env(Reused, second):
        pass

    _, records = run(Env(), 4)
    assert [r.obs[2, 0].item() for r in records] == [201, 202, 203, 200]
    assert [r.critic_obs[2, 0].item() for r in records] == [-201, -202, -203, -200]
    assert [r.reward[2].item() for r in records] == [201, 202, 203, 204]
    assert [r.done[2].item() for r in records] == [False, False, False, True]
    assert [r.extras["ref_motion"][0].item() for r in records] == [1, 2, 3, 4]


def test_fresh_tensors_are_not_copied_again(second):
    class Fresh(second):
        returns_fresh_tensors = True

        def step(self, actions):
            self.answer = super().step(actions)
            return self.answer

    env = Fresh()
    record = RslRlAdapter(env).step(ACTION)
    assert record.obs.data_ptr() == env.answer[0].data_ptr()


@pytest.mark.parametrize("name", ["num_envs", "num_actions"])
def test_a_missing_attribute_is_named(second, name):
    class Lacking(second):
        pass

    setattr(Lacking, name, None)
    with pytest.raises(TypeError, match=f"Lacking has no attribute '{name}'"):
        # The constructor of the stub needs its size; take it away afterwards.
        RslRlAdapter(Lacking.__new__(Lacking))


def test_the_time_limit_may_be_a_tensor_with_one_for_each_environment(second):
    env = second()
    env.max_episode_length = torch.tensor([7, 20, 12])
    assert RslRlAdapter(env).max_episode_length == 20


def test_something_to_observe_is_required(batched):
    env = batched()
    env.step = lambda actions: None
    with pytest.raises(TypeError, match=r"neither a reset\(\) nor a get_observations\(\)"):
        RslRlAdapter(env)


def test_segments_must_add_up(second):
    env = second()
    env.obs_segments = {"joint": 3, "command": (1,)}
    env.critic_obs_segments = {"all": (2,)}
    adapter = RslRlAdapter(env)
    assert adapter.obs_segments == {"joint": (3,), "command": (1,)}
    assert adapter.critic_obs_segments == {"all": (2,)}
    env = second()
    env.obs_segments = {"joint": 3}
    with pytest.raises(ValueError, match=r"obs_segments add up to 3 values \(joint 3\), but the observation has 4"):
        RslRlAdapter(env)


def test_privileged_obs_segments_is_the_old_name(second):
    env = second()
    env.privileged_obs_segments = {"a": 1, "b": 1}
    assert RslRlAdapter(env).critic_obs_segments == {"a": (1,), "b": (1,)}


def test_a_group_that_changes_its_shape_is_named_with_its_step(third):
    class Shrinking(third):
        def groups(self, obs, critic):
            return {"policy": obs, "critic": critic[:, : 1 if self.t[2] == 3 else 2]}

    adapter = RslRlAdapter(Shrinking())
    adapter.step(ACTION)
    adapter.step(ACTION)
    with pytest.raises(ValueError, match=r"group 'critic' changed at step 3: expected \(\(3, 2\).*got \(\(3, 1\)"):
        adapter.step(ACTION)


def test_a_group_that_disappears_or_changes_its_kind_is_named(third):
    class Losing(third):
        def groups(self, obs, critic):
            return {"policy": obs} if self.t[2] == 1 else {"policy": obs, "critic": critic}

    with pytest.raises(ValueError, match=r"group 'critic' changed at step 1: expected .*, got nothing"):
        RslRlAdapter(Losing()).step(ACTION)

    class Turning(third):
        def groups(self, obs, critic):
            return {"policy": obs.byte() if self.t[2] == 1 else obs}

    with pytest.raises(ValueError, match=r"group 'policy' changed at step 1: .*float32.*uint8"):
        RslRlAdapter(Turning()).step(ACTION)


def test_an_order_that_changes_is_an_error(third):
    class Shuffling(third):
        def groups(self, obs, critic):
            parts = {"a": obs, "b": obs + 0.5}
            return {"policy": dict(reversed(parts.items())) if self.t[2] == 1 else parts}

    with pytest.raises(ValueError, match=r"another order at step 1: expected \['policy.a', 'policy.b'\]"):
        RslRlAdapter(Shuffling()).step(ACTION)


def test_missing_final_observations_are_noticed_at_the_first_end(second):
    adapter = RslRlAdapter(second())
    adapter.step(ACTION)
    assert adapter.gives_final_obs
    record = adapter.step(ACTION)
    assert record.truncated.any()
    assert record.final_obs is None
    assert not adapter.gives_final_obs


def test_final_observations_of_the_actor_alone_leave_the_critics_unknown(second):
    class Half(second):
        def step(self, actions):
            reward, done, final = self.advance()
            extras = {"observations": {"critic": self.critic}, "time_outs": done, "final_obs": final[0]}
            return self.obs, reward, done, extras

    _, records = run(Half())
    assert records[1].final_obs[0, 0] == 2
    assert records[1].final_critic_obs is None


def test_other_groups_of_the_final_observation_stay_in_the_extras(second):
    class Amp(second):
        def step(self, actions):
            reward, done, (obs, critic) = self.advance()
            extras = {"observations": {"critic": self.critic, "ref_obs": self.obs[:, :1]}, "time_outs": done}
            extras["final_observation"] = {"policy": obs, "critic": critic, "ref_obs": obs[:, :1]}
            return self.obs, reward, done, extras

    _, records = run(Amp())
    assert records[1].extras["final_observation"]["ref_obs"][0, 0] == 2
    assert records[1].extras["observations"]["ref_obs"][0, 0] == 0
    assert records[1].final_critic_obs[0].tolist() == [-2, -2]


def test_attributes_of_the_environment_are_reached(second):
    env = second()
    env.tracking_error, env.CoT, env.cfg = 0.3, 0.7, {"seed": 1}
    adapter = RslRlAdapter(env)
    assert (adapter.tracking_error, adapter.CoT, adapter.cfg) == (0.3, 0.7, {"seed": 1})
    adapter.episode_length_buf = torch.tensor([4, 5, 6])
    assert env.episode_length_buf.tolist() == [4, 5, 6]
    assert adapter.episode_length_buf is env.episode_length_buf
    with pytest.raises(AttributeError, match="neither RslRlAdapter nor its Second has an attribute 'reward_scale'"):
        _ = adapter.reward_scale


def test_an_environment_without_episode_lengths_has_none_to_set(second):
    env = second()
    del env.episode_length_buf
    adapter = RslRlAdapter(env)
    assert not hasattr(adapter, "episode_length_buf")
    with pytest.raises(AttributeError, match="Second has no episode_length_buf to set"):
        adapter.episode_length_buf = torch.zeros(3)


def test_a_batched_gymnasium_environment_works_too(batched):
    class Lab(batched):
        single_action_space = spaces.Box(-1, 1, (2,))
        num_actions = None

        def reset(self):
            return {"policy": self.obs, "critic": self.critic}, {}

        def step(self, actions):
            reward, done, (obs, critic) = self.advance()
            cut = done & (torch.arange(3) > 0)
            extras = {"final_obs": {"policy": obs, "critic": critic}}
            return {"policy": self.obs, "critic": self.critic}, reward, done & ~cut, cut, extras

    adapter, records = run(Lab())
    assert adapter.contract == "rsl_rl style, batched Gymnasium"
    assert records[1].terminated.tolist() == [True, False, False]
    assert records[2].truncated.tolist() == [False, True, False]
    assert records[2].final_critic_obs[1].tolist() == [-103, -103]


def test_amp_for_hardware_returns_seven_things(legacy):
    class Amp(legacy):
        def step(self, actions):
            return *super().step(actions), torch.tensor([0]), torch.ones(1, 5)

    adapter, records = run(Amp())
    assert adapter.contract == "rsl_rl style, 1.x (7-tuple)"
    assert records[0].extras["terminal_amp_states"].shape == (1, 5)


def test_another_number_of_step_results_is_an_error(second):
    class Three(second):
        def step(self, actions):
            return super().step(actions)[:3]

    with pytest.raises(TypeError, match=r"step\(\) returned 3 values"):
        RslRlAdapter(Three()).step(ACTION)


def test_batched_environments_are_distinguished_from_single_ones(second, scripted):
    assert is_batched(second())
    assert not is_batched(scripted())
    assert not is_batched(second)
    assert not is_batched(object())


def test_obs_groups_choose():
    groups = {"policy": A, "critic": B, "terrain": C}
    assert resolve_sets(groups, {"actor": ["policy", "terrain"]}) == (["policy", "terrain"], ["critic"])
    assert resolve_sets(groups, {"policy": ["terrain"], "critic": ["policy"]}) == (["terrain"], ["policy"])
    with pytest.raises(KeyError, match="names the group 'hights'; the environment has"):
        resolve_sets(groups, {"critic": ["hights"]})


def test_a_critic_without_a_set_observes_the_group_of_its_name():
    assert resolve_sets({"joints": A, "critic": B}, {"actor": ["joints"]}) == (["joints"], ["critic"])
    assert resolve_sets({"joints": A, "terrain": B}, {"actor": ["joints"]}) == (["joints"], ["joints"])


def test_an_empty_set_is_an_error():
    for name in ("actor", "policy", "critic"):
        with pytest.raises(ValueError, match=rf"obs_groups\['{name}'\] is empty; name groups of \['policy'\]"):
            resolve_sets({"policy": A}, {name: []})


def test_misspelt_sets_and_groups_named_twice_are_errors():
    with pytest.raises(ValueError, match="'critic'"):
        resolve_sets({"policy": A, "critic": B}, {"critc": ["policy"]})
    with pytest.raises(ValueError, match=r"obs_groups\['policy'\] names a group twice: \['policy', 'policy'\]"):
        resolve_sets({"policy": A}, {"policy": ["policy", "policy"]})
    assert resolve_sets({"policy": A}, {"decoder": ["policy"]}) == (["policy"], ["policy"])


@pytest.mark.parametrize("shape", [(3,), (2, 4), ()])
def test_observations_that_are_no_batch_of_vectors_are_refused(third, shape):
    class Odd(third):
        def get_observations(self):
            return {"policy": torch.zeros(3, 4), "critic": torch.zeros(shape)}

    with pytest.raises(ValueError, match=r"'critic' has the shape .* of 3 environments it must be \(3, values\)"):
        RslRlAdapter(Odd())


def test_an_environment_whose_observations_are_all_empty_is_refused(second):
    class Blind(second):
        def get_observations(self):
            return torch.zeros(3, 0), {"observations": {}}

    with pytest.raises(ValueError, match=r"no observation with any value in it, only \['policy'\]"):
        RslRlAdapter(Blind())


def test_the_critics_group_beside_unknown_names_is_not_given_to_the_actor(third):
    class Named(third):
        names = ("joints", "critic")

    assert RslRlAdapter(Named()).sets == (["joints"], ["critic"])


def test_a_group_that_no_network_sees_is_named(third):
    class Rich(third):
        names = ("policy", "privileged")

        def groups(self, obs, critic):
            return {**super().groups(obs, critic), "depth": critic}

    with pytest.warns(UserWarning, match=r"\['depth'\]"):
        adapter = RslRlAdapter(Rich())
    assert adapter.sets == (["policy"], ["policy", "privileged"])
    assert "depth of the observation is used by no network" in check_env(Rich(), num_steps=2).notes


def test_a_group_that_the_actor_lacks_is_named(third):
    adapter = RslRlAdapter(third(), obs_groups={"actor": ["policy", "critic"]})
    with pytest.raises(KeyError, match=r"groups \['policy', 'critic'\] are observed, .* none of \['policy'\]"):
        take_groups({"policy": A}, adapter.sets[0])


def test_vectors_are_joined_in_order_with_their_segments():
    joined, segments = join_groups({"x": C, "y": {"p": A, "q": B}}, ["y", "x"])
    assert joined[0].tolist() == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert segments == {"p": (1,), "q": (2,), "x": (3,)}
    assert list(segments) == ["p", "q", "x"]


def test_names_that_occur_twice_keep_their_path():
    _, segments = join_groups({"x": {"v": A}, "y": {"v": B}}, ["x", "y"])
    assert segments == {"x.v": (1,), "y.v": (2,)}


def test_one_image_makes_a_dict():
    joined, segments = join_groups({"policy": A, "camera": IMAGE}, ["policy", "camera"])
    assert joined == {"policy": A, "camera": IMAGE}
    assert segments is None
