"""Capture must be invisible: captured and eager training give the same numbers."""

import warnings

import pytest
import torch
from device_waits import iterations_without_looks

from canter.envs.wrap import wrap_env
from canter.execution.executor import Executor
from canter.runners import OnPolicyRunner

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def trained(task, execution, iterations=12, policy=None, algorithm=None, num_envs=64, **run):
    env = wrap_env(task, CUDA, num_envs=num_envs, seed=1)
    cfg = {
        "num_steps_per_env": 16,
        "seed": 3,
        "algorithm": {
            "num_learning_epochs": 2,
            "num_mini_batches": 3,
            "schedule": "adaptive",
            "empirical_normalization": True,
            "normalize_rewards": True,
            "execution": execution,
            "precision": "fp32",
            **(algorithm or {}),
        },
        "policy": {"actor_hidden_dims": [64, 64], "critic_hidden_dims": [64, 64], **(policy or {})},
        **run,
    }
    runner = OnPolicyRunner(env, cfg, None, CUDA, show_progress=False)
    runner.learn(iterations)
    return runner


def assert_same(a, b):
    for (name, x), y in zip(a.alg.policy.state_dict().items(), b.alg.policy.state_dict().values(), strict=True):
        assert torch.equal(x, y), f"{name} differs by {(x - y).abs().max()}"
    assert float(a.alg.lr) == float(b.alg.lr)
    assert list(a.rewbuffer) == list(b.rewbuffer)


@pytest.mark.parametrize("task", ["canter/CartPole", "canter/Pendulum", "canter/PointRobot"])
@pytest.mark.parametrize("rnn", [None, "lstm", "gru"])
def test_captured_equals_eager(task, rnn):
    policy = {"class_name": "ActorCriticRecurrent", "rnn_type": rnn, "rnn_hidden_size": 32} if rnn else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a capture that fails warns
        captured = trained(task, "graph", policy=policy)
    assert captured.alg.executor.graphs
    assert not captured.alg.executor.eager_only
    assert_same(captured, trained(task, "eager", policy=policy))


FLIP = {"velocity": [1, -1], "command": [1, -1], "last_action": [1, -1]}
MIRROR = {"obs": FLIP, "critic_obs": {**FLIP, "true_velocity": [1, -1], "friction": "same"}, "actions": [1, -1]}
GRU = {"class_name": "ActorCriticRecurrent", "rnn_type": "gru", "rnn_hidden_size": 32}
OPTIONS = {
    "beta": ({"action_distribution": "beta"}, {}),
    "state_std": ({"state_dependent_std": True, "noise_std_type": "log"}, {"clip_max_std": 1.5}),
    "popart": ({}, {"value_normalization": "popart", "normalize_rewards": False}),
    "symmetry": ({}, {"symmetry_cfg": {**MIRROR, "mirror_loss_coef": 0.1}}),
    "all": (
        {**GRU, "action_distribution": "beta"},
        {"value_normalization": "popart", "symmetry_cfg": {**MIRROR, "mirror_loss_coef": 0.1}},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_captured_equal_eager(name):
    policy, algorithm = OPTIONS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        captured = trained("canter/PointRobot", "graph", policy=policy, algorithm=algorithm)
    assert captured.alg.executor.graphs
    assert not captured.alg.executor.eager_only
    assert_same(captured, trained("canter/PointRobot", "eager", policy=policy, algorithm=algorithm))


def test_fifty_iterations_captured_equal_eager():
    assert_same(trained("canter/CartPole", "graph", 50), trained("canter/CartPole", "eager", 50))


def test_compiled_learns_the_same_to_rounding():
    a, b = trained("canter/Pendulum", "compile", 6), trained("canter/Pendulum", "eager", 6)
    for x, y in zip(a.alg.policy.parameters(), b.alg.policy.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0.05, atol=0.01)


def test_a_run_goes_on_when_auto_begins_to_compile(monkeypatch):
    monkeypatch.setattr("canter.execution.executor.COMPILE_FROM", 8)
    a, b = trained("canter/Pendulum", "auto", 16), trained("canter/Pendulum", "eager", 16)
    assert a.alg.executor.is_compiled
    assert {signature[0] for signature in a.alg.executor.graphs} >= {"rollout", "learn"}
    for x, y in zip(a.alg.policy.parameters(), b.alg.policy.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0.05, atol=0.02)


def test_every_replay_draws_new_noise():
    runner = trained("canter/Pendulum", "graph", 5)
    actions = [runner.alg.act(runner.obs, runner.critic_obs) for _ in range(4)]
    assert len({float(a.sum()) for a in actions}) == 4


def test_schedules_take_effect_in_captured_steps():
    algorithm = {"schedule": "linear", "clip_schedule": "linear", "learning_rate": 1e-2}
    runs = [trained("canter/CartPole", e, 10, algorithm=algorithm, max_iterations=20) for e in ("graph", "eager")]
    assert_same(*runs)
    assert float(runs[0].alg.lr) == pytest.approx(5e-3)


def test_a_nonfinite_gradient_is_skipped_in_a_captured_step():
    runner = trained("canter/CartPole", "graph", 5)
    alg = runner.alg
    with torch.inference_mode():
        runner.collect()
    alg.rollout.advantages.fill_(float("nan"))
    before = [p.detach().clone() for p in alg.policy.parameters()]
    _, stats = alg.update(0)
    assert stats["nonfinite_updates"] == 6
    assert all(torch.equal(p, q) for p, q in zip(before, alg.policy.parameters(), strict=True))


def test_a_loss_term_with_a_double_backward_is_captured():
    from canter.algorithms import PPO

    class Penalised(PPO):
        def loss_terms(self, batch, out):
            terms = super().loss_terms(batch, out)
            x = batch.obs.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.policy.critic(x).sum(), x, create_graph=True)
            terms.losses["penalty"] = gradient.square().sum(-1).mean()
            return terms

    def made(execution):
        env = wrap_env("canter/Pendulum", CUDA, num_envs=32, seed=1)
        from canter.modules import ActorCritic

        torch.manual_seed(0)
        alg = Penalised(ActorCritic(3, 1), device="cuda", seed=1, execution=execution, precision="fp32", env=env)
        alg.loss_weights["penalty"] = 1.0
        runner = OnPolicyRunner(env, agent=alg, show_progress=False)
        runner.learn(6)
        return runner

    a, b = made("graph"), made("eager")
    assert not a.alg.executor.eager_only
    assert_same(a, b)


def test_a_function_that_cannot_be_captured_runs_eagerly_with_one_message():
    executor = Executor(CUDA, "graph")
    x = torch.ones(3, device=CUDA)

    def waits(x):
        return x * float(x.sum())

    with pytest.warns(UserWarning, match="'waits' cannot be captured") as caught:
        results = [executor.run("waits", waits, x).clone() for _ in range(6)]
    assert len(caught) == 1
    assert all(torch.equal(r, 3 * x) for r in results)


def test_other_shapes_get_graphs_of_their_own():
    executor = Executor(CUDA, "graph")
    for n in (3, 5) * 6:
        x = torch.arange(float(n), device=CUDA)
        assert torch.equal(executor.run("double", lambda x: {"y": 2 * x}, x)["y"], 2 * x)
    assert len(executor.graphs) == 2


def test_importing_and_training_leave_the_precision_of_others_alone():
    before = torch.get_float32_matmul_precision()
    trained("canter/CartPole", "graph", 3)
    assert torch.get_float32_matmul_precision() == before


def test_an_iteration_waits_for_the_device_at_most_five_times(monkeypatch):
    for policy in ({}, {"class_name": "ActorCriticRecurrent", "rnn_hidden_size": 32}):
        runner = trained("canter/CartPole", "graph", 8, policy=policy, log_interval=0)
        for waits in iterations_without_looks(runner, monkeypatch):
            assert len(waits) <= 5, "\n".join(waits)


@pytest.mark.parametrize("group", ["obs", "reward"])
def test_nan_on_a_gpu_is_named_before_it_is_learned_from(group):
    from canter.utils.metrics import NonFiniteError

    runner = trained("canter/Pendulum", "graph", 4)
    before = [p.detach().clone() for p in runner.alg.policy.parameters()]
    runner.env._state[next(iter(runner.env._state))][5] = float("nan")
    with pytest.raises(NonFiniteError, match="environments 5"):
        runner.learn(2)
    assert all(torch.isfinite(p).all() for p in runner.alg.policy.parameters())
    assert len(before)


def test_after_a_failed_capture_random_streams_go_on_as_in_an_eager_run():
    def draws(execution):
        executor = Executor(torch.device("cuda"), execution)
        generator = torch.Generator("cuda").manual_seed(3)
        executor.generators.append(generator)
        kept = []

        def fine():
            return torch.rand(4, generator=generator, device="cuda")

        def reads_the_host(x):
            noise = torch.rand(4, generator=generator, device="cuda")
            return noise if noise.sum().item() > -1 else x

        for _ in range(12):
            kept.append(executor.run("fine", fine).clone())
            kept.append(executor.run("host", reads_the_host, torch.zeros(4, device="cuda")).clone())
        return torch.stack(kept), executor

    with pytest.warns(UserWarning, match="'host' cannot be captured"):
        captured, executor = draws("graph")
    assert set(executor.eager_only) == {"host"}
    assert executor.graphs
    assert torch.equal(captured, draws("eager")[0])


def test_a_checkpoint_saved_behind_queued_kernels_holds_their_results(tmp_path):
    from canter.utils.checkpoint import load_checkpoint, save_checkpoint

    weight = torch.zeros(4096, 4096, device="cuda")
    for step in range(20):
        product = torch.randn(4096, 4096, device="cuda")
        for _ in range(5):
            product = product @ product
        weight += product.isnan() | True  # 1, after some milliseconds of work
        save_checkpoint(tmp_path / "model.pt", {"weight": weight})
        assert (load_checkpoint(tmp_path / "model.pt", "cpu")["weight"] == step + 1).all()
