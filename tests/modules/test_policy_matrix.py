"""Every preset policy and every pair of stages, with and without memory, through the same tests.

The table is tests/policy_table.py; a stage added there is run through everything here.
"""

import copy
import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from policy_table import PAIRS, PRESETS, KitEnv, build, build_algorithm

from canter.modules.build import POLICIES, build_actor_critic
from canter.storage.trajectories import Trajectories, episode_starts, start_positions, trajectory_index
from canter.utils.checkpoint import load_checkpoint, save_checkpoint
from canter.utils.config import setting_names

GOLDEN = Path(__file__).parent / "policy_keys.json"
UNTRAINED = ("discriminator",)  # learned by APPO alone


def ids(case):
    return case.id


presets = pytest.mark.parametrize("case", PRESETS, ids=ids)
# A GRU is recorded as thousands of small steps, which takes seconds; one of them is enough.
RECORDED = [case for case in PRESETS if case.memory != "gru" or case.name == "StateAcRecurrent"]
every = pytest.mark.parametrize("case", [*PRESETS, *PAIRS], ids=ids)


def rollout_of(policy, num_steps=5, num_envs=3):
    """Observations, episode ends in the middle, and random masks of a (T, N) rollout."""
    generator = torch.Generator().manual_seed(1)
    obs = torch.randn(num_steps, num_envs, 49, generator=generator)
    critic_obs = torch.randn(num_steps, num_envs, 51, generator=generator)
    dones = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]).bool()
    masks = {name: torch.rand(num_steps, num_envs, 1, generator=generator) < 0.5 for name in policy.random_mask_probs}
    return obs, critic_obs, dones, masks


@every
def test_a_sequence_cut_at_episode_ends_is_its_steps(case):
    policy = build(case)
    obs, critic_obs, dones, masks = rollout_of(policy)
    hidden, steps, kept = policy.initial_hidden(3), [], []
    for t in range(5):
        kept.append(hidden)
        out = policy(obs[t], critic_obs[t], hidden, None, {name: mask[t] for name, mask in masks.items()})
        steps.append(out)
        hidden = {name: state.masked_fill(dones[t].view(-1, 1, 1, 1), 0.0) for name, state in out.hidden.items()}
    trajectories, first = None, {}
    if policy.is_recurrent:
        starts = episode_starts(dones)
        row, column = trajectory_index(starts)
        trajectories = Trajectories(row, column, 6)
        where = start_positions(starts, column, 6)
        first = {name: torch.stack([h[name] for h in kept]).flatten(0, 1)[where] for name in hidden}
    whole = policy(obs, critic_obs, first, trajectories, masks)
    for name, value in {**whole.params, **whole.aux, "value": whole.value}.items():
        if name == "sigma":
            continue
        parts = [{**out.params, **out.aux, "value": out.value}[name] for out in steps]
        torch.testing.assert_close(value, torch.stack(parts), rtol=1e-4, atol=1e-5, msg=name)


@every
def test_learning_repeats_the_collected_outputs_and_trains_every_part(case, collect):
    env = KitEnv()
    alg = build_algorithm(case, env, empirical_normalization=True)
    collect(alg, env)
    alg.update(0)  # the normalisers know something now
    collect(alg, env)
    assert alg.rollout.dones[1:-1].any(), "no reset inside the rollout"
    for batch in alg.mini_batches():
        out = alg.policy(batch.obs, batch.critic_obs, batch.hidden, batch.trajectories, batch.random_masks)
        ratio = alg.compute_losses(batch).inter_vars["ratio"]
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out.value, batch.values, rtol=1e-4, atol=1e-4)
    before = {name: p.detach().clone() for name, p in alg.policy.named_parameters()}
    alg.update(1)
    changed = {name.partition(".")[0] for name, p in alg.policy.named_parameters() if not torch.equal(p, before[name])}
    parts = {name.partition(".")[0] for name in before} - set(UNTRAINED)
    assert parts <= changed


@presets
def test_acting_and_learning_never_wait_for_the_device(case, run_without_waiting):
    env = KitEnv()
    run_without_waiting(build_algorithm(case, env, empirical_normalization=True, schedule="adaptive"), env)


@presets
def test_a_pass_leaves_nothing_on_the_policy(case):
    policy = build(case)
    obs, critic_obs, _, _ = rollout_of(policy)
    before = {name: id(value) for name, value in vars(policy).items()}
    policy(obs[0], critic_obs[0])
    policy.infer(obs[0])
    policy.value(critic_obs[0])
    assert {name: id(value) for name, value in vars(policy).items()} == before
    assert all(memory.state is None for memory in policy.memories.values())


@presets
def test_a_policy_is_copied_and_pickled_in_the_middle_of_an_episode(case):
    policy, obs = build(case), torch.ones(3, 49)
    policy.act(obs)
    copies = copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))  # noqa: S301 (its own)
    actions = policy.act_inference(obs)
    assert all(torch.equal(copied.act_inference(obs), actions) for copied in copies)


@presets
def test_a_saved_policy_acts_the_same_in_another_process_order(case, tmp_path):
    one, other = build(case), build(case, seed=9)
    obs, critic_obs, _, _ = rollout_of(one)
    save_checkpoint(tmp_path / "p.pt", {"model_state_dict": one.state_dict()})
    before = other(obs[0], critic_obs[0])
    other.load_state_dict(load_checkpoint(tmp_path / "p.pt")["model_state_dict"])
    expected, got = one(obs[0], critic_obs[0]), other(obs[0], critic_obs[0])
    assert not torch.equal(before.mean, expected.mean)
    assert torch.equal(got.mean, expected.mean)
    assert torch.equal(got.value, expected.value)
    assert torch.equal(one.act_inference(obs[0]), other.act_inference(obs[0]))


@presets
def test_stateful_calls_equal_the_pure_core(case):
    core, stateful = build(case), build(case)
    hidden = core.initial_hidden(3)
    obs, critic_obs, _, _ = rollout_of(core)
    for t in range(3):
        action, hidden_after = core.infer(obs[t], hidden)
        assert torch.equal(stateful.act_inference(obs[t]), action)
        value, hidden = core.value(critic_obs[t], hidden_after)
        assert torch.equal(stateful.evaluate(critic_obs[t]), value)
    states = stateful.get_hidden_states()
    if core.is_recurrent:
        packed = stateful.unpack_hidden(states, "actor") | stateful.unpack_hidden(states, "critic")
        assert packed.keys() == hidden.keys()
        assert all(torch.equal(packed[name], hidden[name]) for name in hidden)
    else:
        assert states is None


@presets
def test_names_and_order_of_the_weights_stay(case):
    golden = json.loads(GOLDEN.read_text())
    policy = build(case)
    assert [[name, list(p.shape)] for name, p in policy.named_parameters()] == golden[case.id]["parameters"]
    assert list(policy.state_dict()) == golden[case.id]["state_dict"]


@presets
def test_settings_are_the_constructors_and_unknown_ones_are_refused(case):
    if case.name not in POLICIES:
        return
    env = KitEnv()
    assert case.settings.keys() <= setting_names(case.cls)
    policy = build_actor_critic(env, case.name, case.settings)
    assert policy.obs_segments == env.obs_segments
    with pytest.raises(TypeError, match="'actor_hidden_dims'"):
        build_actor_critic(env, case.name, case.settings | {"actor_hiden_dims": [3]})
    with pytest.raises(TypeError, match=f"{case.name} has no setting 'foo_bar_baz'"):
        case.cls(49, 51, 2, foo_bar_baz=1, **case.settings)


@presets
def test_segments_that_do_not_add_up_are_refused(case):
    with pytest.raises(ValueError, match="add up to 2 values, but the observation has 49"):
        case.cls(49, 51, 2, obs_segments={"pos": 2}, **case.settings)


@pytest.mark.parametrize("case", RECORDED, ids=ids)
def test_recorded_steps_learn_the_same_as_eager_ones(case, collect):
    """On a GPU a recording is a CUDA graph: tests/gpu/test_captured_policies.py."""

    def trained(execution):
        env = KitEnv()
        alg = build_algorithm(case, env, execution=execution, schedule="adaptive", empirical_normalization=True)
        for iteration in range(3):
            collect(alg, env)
            alg.update(iteration)
        return alg

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a step that cannot be recorded warns
        recorded = trained("auto")
    eager = trained("eager")
    assert recorded.executor.graphs
    for (name, x), y in zip(recorded.policy.state_dict().items(), eager.policy.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, msg=name, rtol=1e-5, atol=1e-6)
    masks = [data for name, data in recorded.rollout.data.items() if name.startswith("random_masks.")]
    assert all(data.any() and not data.all() for data in masks)  # every replay draws new masks
