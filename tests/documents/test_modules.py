"""The page "modules" of st_rl, section by section: names, arguments, positions, defaults, shapes and formulas."""

import inspect
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal

from canter.modules import (
    Actor,
    ActorCritic,
    ActorCriticClimbMutex,
    ActorCriticFieldMutex,
    ActorCriticHiddenState,
    ActorCriticMutex,
    ActorCriticRecurrent,
    Conv2dHeadModel,
    Conv2dModel,
    Critic,
    DeterministicPolicyMixin,
    EmpiricalNormalization,
    LstmHiddenState,
    Memory,
    MlpModel,
    Normalize,
    Normalizer,
    PrivilegeStateAcRecurrent,
    RunningMeanStd,
    StateAc,
    StateAcRecurrent,
    VisualDeterministicAC,
    VisualDeterministicRecurrent,
    conv2d_output_shape,
    get_activation_Cls,
)
from canter.modules.all_mixer import EncoderStateAc, EncoderStateAcRecurrent
from canter.modules.amp_discriminator import AmpActorCritic, AmpActorCriticRecurrent, AMPDiscriminator, AmpMixin
from canter.modules.encoder_actor_critic import (
    EncoderActorCritic,
    EncoderActorCriticMixin,
    EncoderActorCriticRecurrent,
    EncoderAmpActorCriticRecurrent,
)
from canter.modules.state_adaptor import AdaptorActorHiddenState, PrivilegeEstimatorMixin
from canter.modules.state_estimator import EstimatorActorHiddenState, EstimatorMixin
from canter.modules.visual_actor_critic import VisualActorCriticMixin
from canter.utils.utils import get_obs_slice

SEGMENTS = {"proprioception": (4,), "height": (2,), "engaging_block": (6,)}
CRITIC_SEGMENTS = {**SEGMENTS, "velocity": (3,)}
SMALL = {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}
SIZES = {"rnn_hidden_size": 5}


def with_segments(cls, **settings):
    torch.manual_seed(0)
    segments = {"obs_segments": SEGMENTS, "critic_obs_segments": CRITIC_SEGMENTS}
    return cls(12, 15, 2, **SMALL, **segments, **settings)


# 1. actor_critic.py
def test_1_1_actor_critic_takes_obs_dim_and_act_dim():
    for policy in (ActorCritic(4, 2), ActorCritic(obs_dim=4, act_dim=2)):
        obs = torch.randn(3, 4)
        actions = policy.act(obs)
        assert actions.shape == (3, 2)
        log_probs, entropy, values = policy.evaluate_actions(obs, actions)
        assert (log_probs.shape, entropy.shape, values.shape) == ((3,), (3,), (3, 1))
        torch.testing.assert_close(log_probs, policy.get_actions_log_prob(actions))


def test_1_1_forward_and_sample_differ_on_purpose():
    policy, obs = ActorCritic(4, 2), torch.randn(3, 4)
    out = policy(obs)  # documented: (dist, value)
    dist = policy.distribution.torch_distribution(out.params)
    assert (dist.mean.shape, out.value.shape) == ((3, 2), (3, 1))
    action, log_prob = policy.sample(obs)  # documented as what `act` returns
    assert (action.shape, log_prob.shape) == ((3, 2), (3,))


def test_1_2_actor_has_two_tanh_layers_of_64_and_gives_a_normal():
    actor = Actor(4, 2)
    actor.load_state_dict(
        {
            **{
                f"fc.{i}.{part}": value
                for i in (0, 2)
                for part, value in nn.Linear((4, 0, 64)[i], 64).state_dict().items()
            },
            **{f"mean.{part}": value for part, value in nn.Linear(64, 2).state_dict().items()},
            "log_std": torch.full((2,), 0.5),
        }
    )
    dist = actor(torch.randn(3, 4))
    assert isinstance(dist, Normal)
    torch.testing.assert_close(dist.stddev, torch.full((3, 2), 0.5).exp())
    assert [type(layer) for layer in actor.fc] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh]
    assert Actor(obs_dim=4, act_dim=2).log_std.tolist() == [0.0, 0.0]


def test_1_3_critic_has_two_tanh_layers_of_64_and_one_value():
    critic = Critic(obs_dim=4)
    assert critic(torch.randn(3, 4)).shape == (3, 1)
    assert [type(layer).__name__ for layer in critic.fc] == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
    assert set(critic.state_dict()) == {f"fc.{i}.{part}" for i in (0, 2, 4) for part in ("weight", "bias")}


# 2. actor_critic_field_mutex.py and 3. actor_critic_mutex.py
@pytest.fixture
def runs(tmp_path):
    """Run directories with a config.json and a model each."""
    paths = []
    for number, scale in enumerate((0.5, 0.25)):
        path = tmp_path / f"run{number}"
        path.mkdir()
        policy = {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}
        config = {
            "policy": policy,
            "control": {"action_scale": scale},
            "normalization": {"obs_scales": {"lin_vel": 2.0}},
        }
        (path / "config.json").write_text(json.dumps(config))
        made = ActorCritic(12, 15, 2, **SMALL, obs_segments=SEGMENTS, critic_obs_segments=CRITIC_SEGMENTS)
        torch.save({"model_state_dict": made.state_dict(), "iter": 3}, path / "model_3.pt")
        paths.append(path)
    return paths


def test_2_1_field_mutex_and_its_methods(runs):
    parameters = inspect.signature(ActorCriticFieldMutex.__init__).parameters
    defaults = [parameters[name].default for name in ("reset_non_selected", "action_smoothing_buffer_len")]
    assert defaults == ["all", 1]
    with pytest.warns(UserWarning, match="have no sub-policy"):
        policy = ActorCriticFieldMutex(
            12,
            15,
            2,
            "ActorCritic",
            runs,
            obs_segments=SEGMENTS,
            critic_obs_segments=CRITIC_SEGMENTS,
            cmd_vel_mapping={1: 0.5, 0: (0.1, 0.2)},
            command="proprioception[3]",
            last_action="proprioception[:2]",
        )
    policy.resample_cmd_vel_current(dones=torch.tensor([True, False, True]))
    obs = torch.zeros(3, 12)
    obs[1, 6 + 1 + 1] = 1.0  # the obstacle of the second sub-policy
    selection = policy.get_policy_selection(observations=obs)
    assert selection.tolist() == [[True, False], [False, True], [True, False]]
    commanded = policy.override_cmd_vel(observations=obs, policy_selection=selection)
    assert commanded[1, 3] == pytest.approx(0.5 * 2.0)  # the velocity times the sub-policy's scale
    recovered = policy.recover_last_action(observations=obs + 1.0, policy_selection=selection)
    assert recovered[1, :2].tolist() == pytest.approx([0.5 / 0.25 * 1.0] * 2)
    assert policy.act_inference(obs).shape == (3, 2)
    assert not policy.act_inference(obs).requires_grad
    policy.reset(dones=torch.tensor([True, False, False]))


def test_2_2_climb_mutex_has_the_documented_obstacle():
    assert ActorCriticClimbMutex.JUMP_OBSTACLE_ID == 3
    assert issubclass(ActorCriticClimbMutex, ActorCriticFieldMutex)


def test_3_mutex_by_position_and_what_it_cannot_do(runs):
    policy = ActorCriticMutex(12, 15, 2, "ActorCritic", runs, SEGMENTS, CRITIC_SEGMENTS, 0.5)
    assert issubclass(ActorCriticMutex, ActorCritic)
    assert isinstance(policy.submodules, nn.ModuleList)
    assert not policy.is_recurrent
    assert policy.state_dict()["subpolicy_action_scale_0"] == 0.5
    assert policy.state_dict()["subpolicy_action_scale_1"].shape == ()
    policy.reset(dones=torch.tensor([True]))
    for call in (policy.act, policy.act_inference):
        with pytest.raises(NotImplementedError):
            call(observations=torch.zeros(1, 12))


def test_3_an_old_config_json_says_which_keys_are_ignored(runs):
    config = json.loads((runs[0] / "config.json").read_text())
    config["policy"] |= {"num_frames": 4, "class_name": "ActorCritic"}
    (runs[0] / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="ignored num_frames, which ActorCritic does not take"):
        ActorCriticMutex(12, 15, 2, None, runs[:1], SEGMENTS, CRITIC_SEGMENTS)


# 4. actor_critic_recurrent.py
def test_4_1_the_constructor_takes_its_arguments_by_position():
    policy = ActorCriticRecurrent(4, 5, 2, [7], [6], "relu", "gru", 9, 2, 0.5)
    assert (policy.memory_a.rnn.hidden_size, policy.memory_a.rnn.num_layers) == (9, 2)
    assert isinstance(policy.memory_c.rnn, nn.GRU)
    assert (policy.actor[0].out_features, policy.critic[0].out_features) == (7, 6)
    assert isinstance(policy.actor[1], nn.ReLU)
    assert policy.noise_std().tolist() == [0.5, 0.5]
    default = ActorCriticRecurrent(4, 5, 2)
    assert isinstance(default.memory_a.rnn, nn.LSTM)
    assert (default.memory_a.rnn.hidden_size, default.memory_a.rnn.num_layers) == (256, 1)
    assert [layer.out_features for layer in default.actor if isinstance(layer, nn.Linear)] == [256, 256, 256, 2]
    with pytest.raises(TypeError, match="multiple values for argument 'rnn_type'"):
        ActorCriticRecurrent(4, 5, 2, [7], [6], "relu", "gru", rnn_type="lstm")


def test_4_1_the_calls_take_observations_masks_and_hidden_states():
    policy = ActorCriticRecurrent(4, 5, 2, **SMALL, **SIZES)
    obs, critic_obs = torch.randn(3, 4), torch.randn(3, 5)
    assert policy.is_recurrent
    policy.act(observations=obs)
    policy.evaluate(critic_observations=critic_obs)
    states = policy.get_hidden_states()
    assert isinstance(states, ActorCriticHiddenState)
    assert isinstance(states.actor, LstmHiddenState)
    assert states.actor.hidden.shape == states.critic.cell.shape == (1, 3, 5)
    masks, batch = torch.ones(6, 3, dtype=torch.bool), torch.randn(6, 3, 4)
    out = policy.act(batch, masks=masks, hidden_states=states.actor)
    assert out.shape == (6, 3, 2)
    assert policy.evaluate(torch.randn(6, 3, 5), masks=masks, hidden_states=states.critic).shape == (6, 3, 1)
    policy.reset(torch.tensor([True, False, False]))
    assert policy.memory_a.hidden_states.hidden[0, 0].abs().sum() == 0
    assert policy.memory_a.hidden_states.hidden[0, 1].abs().sum() > 0
    with pytest.raises(TypeError, match="got multiple values for argument 'obs'"):
        policy.act(obs, observations=obs)
    with pytest.raises(TypeError, match="observatoins"):
        policy.act(observatoins=obs)


def test_4_1_a_second_argument_is_the_critics_observation_unless_it_is_a_mask():
    policy, obs, critic_obs = ActorCritic(4, 5, 2, **SMALL), torch.randn(3, 4), torch.randn(3, 5)
    torch.testing.assert_close(policy.act_inference(obs, critic_obs), policy.act_inference(obs))
    policy.generator = torch.Generator().manual_seed(1)
    first = policy.act(obs)
    policy.generator.manual_seed(1)
    torch.testing.assert_close(policy.act(obs, critic_obs), first)
    with pytest.raises(TypeError, match="masks must be a boolean tensor"):
        ActorCriticRecurrent(4, 5, 2, **SMALL).act(obs, critic_obs, hidden_states={})


def test_4_2_memory():
    memory = Memory(4, type="lstm", num_layers=1, hidden_size=6)
    assert memory.hidden_states is None
    assert memory(torch.randn(3, 4)).shape == (3, 6)
    kept = memory.hidden_states
    memory.hidden_states = LstmHiddenState(kept.hidden * 0 + 1, kept.cell * 0 + 2)
    assert memory.hidden_states.hidden.unique().tolist() == [1.0]
    assert memory.hidden_states.cell.unique().tolist() == [2.0]
    memory.hidden_states = None
    assert memory.hidden_states is None
    gru = Memory(4, "GRU", 2, 6)
    gru(torch.randn(3, 4))
    assert gru.hidden_states.shape == (2, 3, 6)
    assert inspect.signature(Memory.__init__).parameters["hidden_size"].default == 256


def test_4_3_hidden_states_are_tuples_of_arrays():
    assert ActorCriticHiddenState._fields == ("actor", "critic")
    assert LstmHiddenState._fields == ("hidden", "cell")
    pair = LstmHiddenState(torch.arange(4.0), -torch.arange(4.0))
    assert pair[1:3].cell.tolist() == [-1.0, -2.0]


# 5. all_mixer.py
def test_5_mixers_of_estimator_and_encoders():
    assert EncoderStateAc.__mro__.index(EstimatorMixin) < EncoderStateAc.__mro__.index(EncoderActorCriticMixin)
    settings = {"estimator_target_components": ["velocity"], "encoder_component_names": ["height"]}
    source = with_segments(EncoderStateAcRecurrent, **settings, **SIZES)
    target = with_segments(EncoderStateAcRecurrent, **settings, **SIZES)
    with torch.no_grad():
        source.actor[0].weight.fill_(3.0)
    report = target.load_misaligned_state_dict(
        module=source, obs_segments=SEGMENTS, critic_obs_segments=CRITIC_SEGMENTS
    )
    assert "actor.0.weight" in report.copied
    assert target.actor[0].weight.unique().tolist() == [3.0]


# 6. amp_discriminator.py
def test_6_1_discriminator():
    made = AMPDiscriminator(6, 2.0, [8], 0.25, 5)
    parameters = inspect.signature(AMPDiscriminator.__init__).parameters
    assert (parameters["task_reward_lerp"].default, parameters["discriminator_grad_pen"].default) == (0.0, 5)
    x = torch.randn(3, 6)
    assert made(x).shape == (3, 1)
    assert [type(layer) for layer in made.trunk] == [nn.Linear, nn.ReLU]
    with torch.no_grad():
        made.head.weight.zero_()
        made.head.bias.fill_(1.0)
    assert made.compute_grad_pen(amp_obs=x) == 0.0
    for task in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[1.0], [2.0], [3.0]])):
        style, same, total = made.predict_style_reward(x, task)
        assert style.flatten().tolist() == [2.0, 2.0, 2.0]  # 2 * (1 - 0.25 * (d - 1)^2) at d = 1
        assert same is task
        assert total.flatten().tolist() == pytest.approx([0.75 * 2.0 + 0.25 * t for t in (1.0, 2.0, 3.0)])


@pytest.mark.parametrize("cls", [AmpActorCritic, AmpActorCriticRecurrent, EncoderAmpActorCriticRecurrent])
def test_6_2_amp_mixin_builds_the_discriminator_from_its_dict(cls):
    settings = {"input_dim": 6, "style_reward_coef": 2.0, "hidden_dims": [8]}
    policy = cls(4, 5, 2, **SMALL, amp_discriminator=settings)
    assert issubclass(cls, AmpMixin)
    assert isinstance(policy.discriminator, AMPDiscriminator)


# 7. conv2d.py
def test_7_conv2d_models():
    model = Conv2dModel(2, [4, 8], [3, 3], [2, 1], [1, 1])
    assert model.conv_out_resolution(8, 6) == (4, 3)
    assert model.conv_out_size(8, 6) == 8 * 4 * 3
    pooled = Conv2dModel(2, [4], [3], [2], [1], use_maxpool=True)
    convolutions = [layer for layer in pooled.modules() if isinstance(layer, nn.Conv2d)]
    assert convolutions[0].stride == (1, 1)
    assert any(isinstance(layer, nn.MaxPool2d) for layer in pooled.modules())
    head = Conv2dHeadModel((2, 8, 6), [4], [3], [1], hidden_sizes=[10], output_size=5)
    assert head(torch.randn(3, 2, 8, 6)).shape == (3, 5)
    assert Conv2dHeadModel((2, 8, 6), [4], [3], [1], hidden_sizes=[10]).output_size == 10


# 8. deterministic_policy.py
def test_8_a_deterministic_policy_acts_by_its_mean():
    class Mine(DeterministicPolicyMixin, ActorCritic):
        pass

    policy, obs = Mine(4, 5, 2, **SMALL), torch.randn(3, 4)
    torch.testing.assert_close(policy.act(obs), policy.action_mean)
    with pytest.raises(AttributeError, match="action_mean"):

        class Alone(DeterministicPolicyMixin):
            pass


# 9. encoder_actor_critic.py
def test_9_1_encoders_replace_their_components():
    policy = with_segments(
        EncoderActorCritic,
        encoder_component_names=["height"],
        encoder_class_name="MlpModel",
        encoder_kwargs={"hidden_sizes": [5]},
        encoder_output_size=3,
        critic_encoder_component_names="shared",
    )
    obs = torch.randn(4, 12)
    assert policy.encoder_obs_slices == [get_obs_slice(SEGMENTS, "height")] == [(slice(4, 6), (2,))]
    embedded = policy.embed_encoders_latent(obs)
    latent = policy.get_encoder_latent(obs, "height")
    torch.testing.assert_close(embedded, torch.cat([obs[:, :4], latent, obs[:, 6:]], 1))
    assert policy.get_encoder_latent(torch.randn(4, 15), obs_component="height", critic=True).shape == (4, 3)
    assert policy.act(observations=obs).shape == policy.act_inference(observations=obs).shape == (4, 2)
    assert policy.evaluate(critic_observations=torch.randn(4, 15)).shape == (4, 1)


def test_9_2_combined_classes():
    assert issubclass(EncoderActorCritic, EncoderActorCriticMixin)
    assert issubclass(EncoderActorCriticRecurrent, ActorCriticRecurrent)
    assert EncoderAmpActorCriticRecurrent.__bases__ == (EncoderActorCriticMixin, AmpActorCriticRecurrent)


# 10. mlp.py
def test_10_mlp_model():
    assert MlpModel(3, None, 2).model[0].weight.shape == (2, 3)
    assert [type(layer).__name__ for layer in MlpModel(3, [], output_size=2).model] == ["Linear"]
    single = MlpModel(3, 5)
    assert [type(layer) for layer in single.model] == [nn.Linear, nn.ReLU]
    assert single.output_size == single._output_size == 5
    named = MlpModel(3, [5], 2, "Tanh")
    assert [type(layer) for layer in named.model] == [nn.Linear, nn.Tanh, nn.Linear]
    assert named(input=torch.randn(4, 3)).shape == (4, 2)
    assert named._output_size == 2


# 11. normalizer.py
def test_11_1_empirical_normalization():
    norm = EmpiricalNormalization(shape=[2], eps=1e-2, until=4)
    x = torch.tensor([[0.0, 10.0], [2.0, 30.0]])
    norm.update(x)
    assert norm.mean.tolist() == [1.0, 20.0]
    assert norm.std.tolist() == pytest.approx([1.0, 10.0])
    norm.eval()
    torch.testing.assert_close(norm(x), (x - norm.mean) / (norm.std + 1e-2))
    torch.testing.assert_close(norm.inverse(norm(x)), x)
    norm.train()
    norm.update(x + 100)
    norm.update(x + 1000)  # after `until` rows nothing changes
    assert norm.mean.tolist() == [51.0, 70.0]


def test_11_2_normalize_has_length_one():
    torch.testing.assert_close(Normalize()(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.6, 0.8]]))


def test_11_3_running_mean_std_from_moments():
    stats = RunningMeanStd(epsilon=1e-12, shape=(1,))
    stats.update(np.array([[1.0], [3.0]]))
    stats.update_from_moments(batch_mean=np.array([5.0]), batch_var=np.array([0.0]), batch_count=2)
    assert stats.mean.tolist() == pytest.approx([3.5])  # of 1, 3, 5, 5
    assert stats.var.tolist() == pytest.approx([2.75])


def test_11_4_normalizer():
    norm = Normalizer(input_dim=(1,), epsilon=1e-4, clip_obs=2.0)
    norm.update(np.array([[0.0], [2.0]]))
    assert norm.normalize(input=np.array([[1.0], [100.0]])).ravel().tolist() == pytest.approx([0.0, 2.0], abs=1e-3)
    out = norm.normalize_torch(input=torch.tensor([[1.0]]), device="cpu")
    assert out.abs().item() < 1e-3


def test_11_4_update_normalizer_takes_a_loader_of_motion():
    class Rollouts:
        def feed_forward_generator_amp(self, num_mini_batch, mini_batch_size):
            yield (torch.zeros(mini_batch_size, 4),)

    class Loader:  # as canter.datasets.motion_loader.AMPLoader
        feature_columns = torch.arange(2)

        def expert_features(self, count, frames):
            assert frames == 2
            return torch.full((count, 4), 10.0)

    norm = Normalizer(4, epsilon=1e-9)
    norm.update_normalizer(rollouts=Rollouts(), expert_loader=Loader())
    assert norm.mean.tolist() == pytest.approx([5.0] * 4)
    assert norm.var.tolist() == pytest.approx([25.0] * 4)


# 12. state_adaptor.py
def test_12_adaptor_replaces_privileged_state():
    assert AdaptorActorHiddenState._fields == ("adaptor", "actor")
    policy = with_segments(
        PrivilegeStateAcRecurrent,
        estimator_obs_components=["proprioception"],
        estimator_target_components=["velocity"],
        adaptor_obs_components=["proprioception"],
        adaptor_target_components=["height"],
        adaptor_kwargs={"hidden_sizes": [5]},
        privilege_replace_state_prob=1.0,
        **SIZES,
    )
    assert issubclass(PrivilegeStateAcRecurrent, PrivilegeEstimatorMixin)
    policy.act(torch.randn(3, 12), inference=False)
    assert policy.get_adapted_state().shape == (3, 2)
    assert policy.get_estimated_state().shape == (3, 3)  # of the estimator, where a policy has both: on purpose
    assert isinstance(policy.get_hidden_states().actor, AdaptorActorHiddenState)
    policy.act_inference(torch.randn(3, 12))
    policy.reset(dones=torch.tensor([True, False, False]))


# 13. state_estimator.py
@pytest.mark.parametrize("cls", [StateAc, StateAcRecurrent])
def test_13_estimator_predicts_components(cls):
    assert EstimatorActorHiddenState._fields == ("estimator", "actor")
    settings = {"estimator_obs_components": ["proprioception"], "estimator_target_components": ["velocity"]}
    policy = with_segments(cls, **settings, estimator_kwargs={"hidden_sizes": [5]})
    policy.act(torch.randn(3, 12))
    assert policy.get_estimated_state().shape == (3, 3)
    if cls is StateAcRecurrent:
        assert isinstance(policy.get_hidden_states().actor, EstimatorActorHiddenState)
        with pytest.raises(AssertionError):
            with_segments(
                cls, estimator_target_components=["height"], use_actor_rnn=True, replace_state_prob=0.5, **SIZES
            )


# 14. utils.py
def test_14_activations_and_convolution_sizes():
    assert get_activation_Cls(activation_name="lrelu") is nn.LeakyReLU
    assert get_activation_Cls("crelu") is nn.ReLU
    assert isinstance(get_activation_Cls("relu")(), nn.ReLU)
    with pytest.warns(UserWarning, match="'nothing'"):
        assert get_activation_Cls("nothing") is None
    assert conv2d_output_shape(64, 64, kernel_size=3, stride=2, padding=1) == (32, 32)
    assert conv2d_output_shape(64, 32, (3, 5), (1, 2), dilation=(2, 1)) == (60, 14)


# 15. visual_actor_critic.py
@pytest.mark.parametrize("cls", [VisualDeterministicAC, VisualDeterministicRecurrent])
def test_15_visual_policies(cls):
    segments = {"proprioception": (4,), "forward_depth": (1, 8, 8)}
    policy = cls(
        num_actor_obs=68,
        num_critic_obs=68,
        num_actions=2,
        obs_segments=segments,
        visual_component_name="forward_depth",
        visual_kwargs={"channels": [2, 4], "kernel_sizes": [3, 3], "strides": [2, 2]},
        visual_latent_size=6,
        **SMALL,
    )
    assert issubclass(cls, VisualActorCriticMixin)
    obs = torch.rand(3, 68)
    latent = policy.embed_visual_latent(observations=obs)
    assert latent.shape == (3, 10)
    actions = policy.act(observations=obs)
    assert actions.shape == (3, 2)
    policy.reset()
    torch.testing.assert_close(policy.act_with_embedded_latent(observations=latent), actions)
    policy.reset()
    torch.testing.assert_close(policy.act_inference(obs), actions)
