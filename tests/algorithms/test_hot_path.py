"""The device work of an iteration: no host waits, nothing kept on self, nothing shared with the environment."""

import copy

import pytest
import torch
from no_host_sync import NoHostSync

KINDS = ["mlp", "lstm", "gru", "discrete", "multi_discrete", "squashed", "lstm_discrete", "dict"]
KINDS += ["beta", "lstm_beta", "state_std"]


def one_iteration(alg, env, guard):
    """Collect and learn, with each call that must not wait inside `guard()`; returns how many there were."""
    calls = 0

    def guarded(call, *args):
        nonlocal calls
        calls += 1
        with guard():
            return call(*args)

    obs, critic_obs = env.get_observations()
    for _ in range(alg.rollout.num_transitions_per_env):
        record = env.step(guarded(alg.act, obs, critic_obs))
        guarded(alg.process_step, record)
        obs, critic_obs = record.obs, record.critic_obs
    guarded(alg.compute_returns, critic_obs)
    for deal in alg.sample_minibatches()[0]:  # a recurrent pass reads its trajectory counts once, here
        guarded(alg.learn_step, *deal)
    guarded(alg._update_normalizers)
    alg.rollout.clear()
    return calls


@pytest.mark.parametrize("has_invalid_steps", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_acting_and_learning_never_wait_for_the_device(make_ppo, kind, has_invalid_steps):
    settings = {
        "execution": "eager",  # comparisons with replays wait
        "num_mini_batches": 2,
        "schedule": "adaptive",
        "empirical_normalization": True,
        "normalize_rewards": True,
        "normalize_advantage_per_mini_batch": True,
        "clip_max_std": 2.0,
    }
    if kind != "dict":
        settings["rnd_cfg"] = {"weight": 0.1, "state_normalization": True, "reward_normalization": True}
        settings["rnd_cfg"]["weight_schedule"] = {"mode": "linear", "final_step": 10, "final_value": 0.0}
    alg, env = make_ppo(kind, has_invalid_steps=has_invalid_steps, **settings)
    # Constants go to the device and optimizer state is made in the first iteration, as in the warm-up of a capture.
    one_iteration(alg, env, torch.enable_grad)
    assert one_iteration(alg, env, NoHostSync) == 2 * 6 + 1 + 2 + 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_minibatch_and_a_forward_pass_never_wait_for_the_device(make_ppo, collect, kind, minibatch_step):
    alg, env = make_ppo(kind, num_mini_batches=2, schedule="adaptive")
    collect(alg, env)
    alg.update(0)
    collect(alg, env)
    for batch in alg.mini_batches():
        with NoHostSync():
            alg.policy(batch.obs, batch.critic_obs, batch.hidden, batch.trajectories)
            minibatch_step(alg, batch)


@pytest.mark.parametrize(("name", "waits"), [("Adam", False), ("AdamW", False), ("SGD", True), ("RMSprop", True)])
def test_only_optimizers_without_a_fused_form_wait(make_ppo, collect, name, waits, minibatch_step):
    alg, env = make_ppo(optimizer_class_name=name, schedule="adaptive")
    collect(alg, env)
    (batch,) = alg.mini_batches()
    minibatch_step(alg, batch)
    if waits:
        with NoHostSync(), pytest.raises(RuntimeError, match="host sync"):
            minibatch_step(alg, batch)
    else:
        with NoHostSync():
            minibatch_step(alg, batch)


def state_on_self(module):
    """Everything reachable on a module besides parameters and buffers, by identity."""
    plain = {}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_") or name == "_params":
                plain[f"{prefix}.{name}"] = id(value)
    return plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_pass_leaves_nothing_on_the_policy(make_ppo, collect, kind):  # DESIGN idea 1
    alg, env = make_ppo(kind, empirical_normalization=True)
    collect(alg, env)
    before, buffers = state_on_self(alg.policy), copy.deepcopy(dict(alg.policy.named_buffers()))
    obs, critic_obs = env.get_observations()
    alg.policy(obs, critic_obs)
    alg.policy.value(critic_obs)
    alg.policy.infer(obs)
    for batch in alg.mini_batches():
        alg.policy(batch.obs, batch.critic_obs, batch.hidden, batch.trajectories)
    assert state_on_self(alg.policy) == before
    for name, buffer in alg.policy.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("kind", ["mlp", "lstm", "discrete"])
def test_an_environment_that_writes_to_its_actions_changes_no_training(make_ppo, noise_env, snapshot, differing, kind):
    """C11: legged environments scale or clip what they are given in place."""

    class Writing(noise_env):
        def step(self, actions):
            actions.mul_(0)
            return super().step(actions)

    states = []
    for env_class in (noise_env, Writing):
        alg, env = make_ppo(kind, env=env_class(kind))
        one_iteration(alg, env, torch.enable_grad)
        states.append(snapshot(alg))
        assert (alg.rollout.actions != 0).any()
    assert differing(*states) == []


@pytest.mark.parametrize("kind", ["mlp", "lstm", "gru"])
def test_collecting_under_autograd_keeps_no_graph(make_ppo, kind):
    """The documented loop calls act and process_env_step without any torch context."""
    alg, env = make_ppo(kind, num_learning_epochs=2)
    for _ in range(2):
        one_iteration(alg, env, torch.enable_grad)
        assert not any(data.requires_grad for data in alg.rollout.data.values())
        assert not any(state.requires_grad for state in alg.policy.hidden(4).values())


@pytest.mark.parametrize(
    ("field", "optimizer"),
    [("advantages", "Adam"), ("returns", "AdamW"), ("obs", "SGD"), ("old_actions_log_prob", "RMSprop")],
)
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_minibatch_that_is_not_finite_changes_no_bit(
    make_ppo, collect, snapshot, differing, optimizer, bad, field, minibatch_step
):
    alg, env = make_ppo(optimizer_class_name=optimizer, num_mini_batches=3)
    collect(alg, env)
    alg.update(0)  # so that there are moments to spoil
    collect(alg, env)
    before = snapshot(alg)
    poisoned = next(iter(alg.mini_batches()))
    getattr(poisoned, field)[1] = bad
    values = minibatch_step(alg, poisoned)
    assert float(values["stats/nonfinite_updates"]) == 1
    assert differing(before, snapshot(alg)) == []
    moments = [name for name in before if name.endswith(("exp_avg", "square_avg"))]
    assert len(moments) == (0 if optimizer == "SGD" else 9)


def test_updates_that_are_not_finite_are_counted(make_ppo, collect, snapshot, differing):
    alg, env = make_ppo(num_mini_batches=4, num_learning_epochs=2, normalize_advantage_per_mini_batch=True)
    collect(alg, env)
    before = snapshot(alg)
    alg.rollout.returns[2, 1] = float("nan")  # one sample: one minibatch of four, in each epoch
    _, stats = alg.update(0)
    assert stats["nonfinite_updates"] == 2
    assert [value for name, value in snapshot(alg).items() if name.endswith(".step")] == [6.0] * 9
    assert all(torch.isfinite(value).all() for value in snapshot(alg).values() if torch.is_tensor(value))
    assert differing(before, snapshot(alg))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_never_reaches_the_weights(make_ppo, collect, snapshot, differing, bad):
    alg, env = make_ppo(num_mini_batches=2, num_learning_epochs=2)
    collect(alg, env)
    alg.update(0)
    collect(alg, env)
    before = snapshot(alg)
    alg.rollout.rewards[3, 2] = bad
    alg.compute_returns(env.get_observations()[1])  # the rollout's mean and so every advantage is spoilt
    _, stats = alg.update(0)
    assert stats["nonfinite_updates"] == 4
    assert differing(before, snapshot(alg)) == []
