"""Every policy, algorithm and action distribution in every format."""

import importlib.util
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from canter.export.bundle import export_bundle
from canter.export.c_code import c_files
from canter.export.c_writer import NotInCError, literal
from canter.export.graph import StepModule, commands_middle_velocity
from canter.export.parity import compiler
from canter.export.runtime import Bundle, Policy
from canter.modules import (
    ActorCritic,
    ActorCriticFieldMutex,
    ActorCriticRecurrent,
    CNNActor,
    CNNCritic,
    EncoderActorCritic,
    StateAc,
)
from canter.modules.build import build_normalizer
from canter.modules.q_networks import CNNQNetwork, MLPQNetwork, QPolicy
from canter.runners.evaluation import InferencePolicy


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TESTS = Path(__file__).parent.parent
runs = module_at(TESTS / "modules" / "mutex_runs.py")
table = module_at(TESTS / "policy_table.py")
SMALL = {"actor_hidden_dims": (8,), "critic_hidden_dims": (4,)}
ALL = {"policy.onnx", "policy.ts"} | ({"policy.c"} if compiler() else set())


def check(acting, folder):
    made = export_bundle(acting, folder / "bundle")
    assert made.left_out == {}
    assert {name for name, value in made.parity.items() if value < 2e-6} == ALL
    return made


@pytest.mark.slow
@pytest.mark.parametrize("case", table.PRESETS, ids=lambda case: case.id)
def test_every_policy_of_the_table_is_the_same_in_every_format(case, tmp_path):
    check(InferencePolicy(table.build(case).eval(), segments=table.SEGMENTS), tmp_path)


@pytest.mark.parametrize(
    "case", [c for c in table.PRESETS if c.id == "EncoderStateAcRecurrent-gru"], ids=lambda c: c.id
)
def test_estimator_encoders_and_memories_together(case, tmp_path):
    policy = table.build(case).eval()
    made = check(InferencePolicy(policy, segments=table.SEGMENTS), tmp_path)
    spec = Bundle(made.path).spec
    assert [port["name"] for port in spec["outputs"]] == ["actions", "estimated_state"]
    assert {memory["name"] for memory in spec["memories"]} == {"memory_a", "memory_s"}  # not the critic's


def test_a_window_as_the_only_segment_is_exported_for_any_batch(tmp_path):
    settings = {"obs_segments": {"angle": (5, 2)}, "critic_obs_segments": {"angle": (5, 2), "speed": (1,)}}
    policy = StateAc(10, 11, 1, estimator_target_components=("speed",), append_estimate=True, **settings, **SMALL)
    made = check(InferencePolicy(policy.eval(), segments={"angle": (5, 2)}), tmp_path)
    assert "| angle | 0 | 10 (5 x 2) |" in (made.path / "README.md").read_text()
    assert all(Policy(made.path).predict(np.zeros((rows, 10))).shape == (rows, 1) for rows in (1, 5))


def test_an_estimate_is_in_physical_units():
    policy = StateAc(
        5,
        7,
        2,
        obs_segments={"a": 5},
        critic_obs_segments={"a": 5, "v": 2},
        append_estimate=True,
        estimator_target_components=("v",),
        **SMALL,
    ).eval()
    policy.obs_normalizer, policy.critic_obs_normalizer = build_normalizer(5), build_normalizer(7)
    policy.critic_obs_normalizer._mean[:, 5:] = torch.tensor([10.0, -3.0])
    policy.critic_obs_normalizer._std[:, 5:] = torch.tensor([2.0, 4.0])
    module, obs = StepModule(InferencePolicy(policy)), torch.randn(3, 5)
    actions, estimate = module(obs)
    assert torch.allclose(actions, policy.act_inference(obs), atol=1e-6)
    raw = policy.get_estimated_state()
    assert torch.allclose(estimate, raw * (torch.tensor([2.0, 4.0]) + 0.01) + torch.tensor([10.0, -3.0]), atol=1e-5)


def test_actions_estimates_and_logits_are_the_outputs_of_the_runtime(tmp_path):
    network = MLPQNetwork(spaces.Box(-1, 1, (4,)), spaces.Discrete(3), {"hidden_dims": [8], "dueling": True})
    policy = QPolicy(network, spaces.Discrete(3))
    made = check(InferencePolicy(policy.eval()), tmp_path)
    acting, obs = Policy(made.path), np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    actions = acting.predict(obs)
    assert actions.dtype == np.int64
    values = network(torch.from_numpy(obs)).detach().numpy()
    assert np.abs(acting.outputs["logits"] - values).max() < 1e-6
    assert np.array_equal(actions, values.argmax(-1))


@pytest.mark.parametrize("nvec", [[2, 4, 3]])
def test_several_choices_at_once(nvec, tmp_path):
    policy = ActorCritic(4, 4, sum(nvec), action_space=spaces.MultiDiscrete(nvec), **SMALL)
    made = check(InferencePolicy(policy.eval()), tmp_path)
    assert Bundle(made.path).samples["output.actions"].shape == (24, 3, 3)


def test_bytes_of_images_are_scaled_inside(tmp_path):
    image, actions = spaces.Box(0, 255, (12, 12, 3), np.uint8), spaces.Box(-1, 1, (2,))
    cfg = {"conv_channels": [4, 4], "conv_kernels": [3, 3], "conv_strides": [2, 1], "hidden_dims": [8]}
    policy = ActorCritic(actor=CNNActor(image, actions, {**cfg, "use_tanh_squash": True}), critic=CNNCritic(image, cfg))
    made = check(InferencePolicy(policy.eval()), tmp_path)
    assert Bundle(made.path).spec["inputs"][0] == {"name": "obs", "shape": [12, 12, 3], "dtype": "uint8"}
    with pytest.raises(ValueError, match="obs has numbers of type float64; the policy wants uint8 from 0 to 255"):
        Policy(made.path).predict(np.full((12, 12, 3), 0.5))
    assert StepModule(InferencePolicy(QPolicy(CNNQNetwork(image, spaces.Discrete(2), cfg), spaces.Discrete(2))))


def test_dicts_have_one_input_for_each_part(tmp_path):
    segments = {"camera": (1, 8, 8), "arm": (3,)}
    policy = EncoderActorCritic(
        67,
        67,
        2,
        obs_segments=segments,
        encoder_component_names=("camera",),
        encoder_class_name="Conv2dHeadModel",
        encoder_kwargs={"channels": (3,), "kernel_sizes": (3,), "strides": (2,), "hidden_sizes": (4,)},
        **SMALL,
    )
    space = spaces.Dict({"camera": spaces.Box(0, 255, (1, 8, 8), np.uint8), "arm": spaces.Box(-1, 1, (3,))})
    made = check(InferencePolicy(policy.eval(), space), tmp_path)
    inputs = Bundle(made.path).spec["inputs"]
    assert {(port["name"], port["dtype"]) for port in inputs} == {("camera", "uint8"), ("arm", "float32")}


def test_the_bound_of_normalised_observations_is_exported(tmp_path):
    policy = ActorCritic(5, 5, 2, **SMALL)
    policy.obs_normalizer = build_normalizer(5, clip=0.5)
    policy.obs_normalizer.update(torch.randn(64, 5))
    check(InferencePolicy(policy.eval()), tmp_path)  # drawn observations are beyond the bound
    far = policy.act_inference(torch.full((1, 5), 1e3)).detach().numpy()[0]
    assert np.allclose(Policy(tmp_path / "bundle").predict(np.full(5, 1e4, np.float32)), far, atol=1e-6)


def test_names_of_parts_and_tasks_cannot_become_code(tmp_path):
    parts = {"state": (2,), "int": (1,), "a b; exit(1)": (1,)}

    class Sum(nn.Module):
        def forward(self, obs):
            return torch.cat(list(obs.values()), -1).sum(-1, keepdim=True)

    space = spaces.Dict([(name, spaces.Box(-1, 1, shape)) for name, shape in parts.items()])
    policy = ActorCritic(actor=Sum(), critic=Sum(), action_space=spaces.Box(-1, 1, (1,)))
    policy.unused = nn.Linear(1, 1)
    info = {"config": {"run": {"task": "x */ int evil(void) { return 1; } /*\n#error"}}, "environment": {}}
    header, source = c_files(StepModule(InferencePolicy(policy, space, info=info)), info["config"]["run"]["task"])
    assert "const float *xstate, const float *xint, const float *a_b__exit_1_, float *actions" in header
    assert source.splitlines()[0] == "/* x _/ int evil_void_ _ return 1_ _ /___error */"
    clash = spaces.Dict([("a.b", spaces.Box(-1, 1, (1,))), ("a_b", spaces.Box(-1, 1, (1,)))])
    with pytest.raises(NotInCError, match="different names in C for all of a_b, a_b, actions"):
        c_files(StepModule(InferencePolicy(policy, clash)))


@pytest.mark.filterwarnings("ignore:obstacles .* have no sub-policy")
def test_a_mutex_of_recurrent_policies_keeps_choices_and_memories(tmp_path):
    torch.manual_seed(0)
    subs = [runs.constant_policy(float(i), ActorCriticRecurrent, **runs.RNN) for i in range(3)]
    paths = [runs.write_run(tmp_path / str(i), policy) for i, policy in enumerate(subs)]
    policy = ActorCriticFieldMutex(
        runs.NUM_OBS,
        runs.NUM_OBS,
        runs.NUM_ACTIONS,
        None,
        sub_policy_paths=paths,
        obs_segments=runs.SEGMENTS,
        action_smoothing_buffer_len=2,
        cmd_vel_mapping={1: (1.0, 3.0)},
    )
    made = check(InferencePolicy(policy), tmp_path)
    names = [memory["name"] for memory in Bundle(made.path).spec["memories"]]
    assert names == ["selections", "velocities", "memory_a_0", "memory_a_1", "memory_a_2"]
    state = StepModule(InferencePolicy(policy)).policy.velocities
    commands_middle_velocity(state)
    assert state.draw(1).flatten().tolist() == [0.0, 2.0, 0.0]  # the middle of the range


class Odd(nn.Module):
    """Operations that a user's network may have: attention, normalisation, softmax, slices, comparisons, powers."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(9, 2)
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x):
        y = self.norm(self.first(x))
        tokens = y.unflatten(-1, (3, 2))
        mixed = self.attention(tokens, tokens, tokens, need_weights=False)[0].flatten(-2)
        gate = torch.softmax(mixed, -1) * (x > 0).float() + torch.where(x.abs() > 1, x.sign(), x**3)
        best = y.max(-1, keepdim=True).values - y.mean(-1, keepdim=True)
        rest = torch.cat([best, y[..., ::3].exp()], -1)
        return self.last(torch.cat([gate, rest], -1)) / (1 + x.norm(dim=-1, keepdim=True))


def test_odd_networks_of_users_are_the_same_in_every_format(tmp_path):
    torch.manual_seed(0)
    check(InferencePolicy(ActorCritic(6, 6, 2, actor=Odd(), critic=nn.Linear(6, 1)).eval()), tmp_path)


def test_code_that_fixes_the_batch_is_refused_with_the_way_out(tmp_path):
    class Fixed(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.zeros(len(x), 2)

    policy = ActorCritic(3, 3, 2, actor=Fixed(3, 2), critic=nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"ActorCritic cannot be exported: .*x.shape\[0\], not len\(x\)"):
        export_bundle(InferencePolicy(policy), tmp_path / "b")


def test_any_batch_can_be_given_to_onnx_and_torchscript(tmp_path):
    from canter.export.parity import TorchScriptPolicy

    policy = ActorCriticRecurrent(5, 5, 2, rnn_hidden_size=4, **SMALL).eval()
    made = export_bundle(InferencePolicy(policy), tmp_path / "b", formats=("torchscript",))
    bundle = Bundle(made.path)
    for rows in (1, 2, 17):
        obs = np.random.default_rng(rows).normal(size=(rows, 5)).astype(np.float32)
        want = policy.infer(torch.from_numpy(obs))[0].detach().numpy()
        for acting in (Policy(bundle), TorchScriptPolicy(bundle)):
            assert np.abs(acting.predict({"obs": obs}) - want).max() < 1e-6


def test_policies_of_any_structure_ask_for_their_space():
    policy = ActorCritic(actor=nn.Linear(3, 2), critic=nn.Linear(3, 1), action_space=spaces.Box(-1, 1, (2,)))
    with pytest.raises(ValueError, match="takes observations of any structure; give it their space: obs_space="):
        StepModule(InferencePolicy(policy))
    assert StepModule(InferencePolicy(policy, spaces.Box(-1, 1, (3,))))(torch.zeros(1, 3))[0].shape == (1, 2)


@pytest.mark.parametrize("number", [0.1, -1e-30, 3.4e38, 1.0, 123456.789, 2**-149])
def test_numbers_in_c_read_back_as_they_were(number):
    assert np.float32(literal(number).removesuffix("f")) == np.float32(number)


def test_no_warning_reaches_the_user(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # of objects that other tests left
        export_bundle(InferencePolicy(ActorCritic(3, 3, 1, **SMALL).eval()), tmp_path / "b")
