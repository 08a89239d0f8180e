"""Composed policies, and weights that come from another layout of the observation."""

import pytest
import torch

from canter.modules.all_mixer import EncoderStateAc, EncoderStateAcRecurrent, LoadReport
from canter.modules.build import build_normalizer

SEGMENTS = {"pos": (3,), "scan": (6,), "vel": (2,)}
CRITIC = {"pos": (3,), "scan": (6,), "vel": (2,), "push": (2,)}
# Another order, one component gone (push), one new (clock).
OTHER = {"vel": (2,), "clock": (1,), "pos": (3,), "scan": (6,)}
OTHER_CRITIC = {"vel": (2,), "clock": (1,), "pos": (3,), "scan": (6,)}


def width(segments):
    return sum(shape[0] for shape in segments.values())


def make(cls=EncoderStateAc, segments=SEGMENTS, critic=CRITIC, seed=0, names=("scan",), **settings):
    torch.manual_seed(seed)
    if cls is EncoderStateAcRecurrent:
        settings["rnn_hidden_size"] = 4
    return cls(
        width(segments),
        width(critic),
        2,
        obs_segments=segments,
        critic_obs_segments=critic,
        actor_hidden_dims=[8],
        critic_hidden_dims=[8],
        encoder_component_names=names,
        encoder_kwargs={"hidden_sizes": [5]},
        encoder_output_size=4,
        critic_encoder_component_names=["scan"],
        estimator_obs_components=["pos", "scan"],
        estimator_target_components=["vel"],
        estimator_kwargs={"hidden_sizes": [7]},
        **settings,
    )


def test_the_estimator_gets_raw_components_and_the_next_stages_features():
    policy = make(replace_state_prob=1.0)
    obs, seen = torch.randn(3, 11), []
    policy.actor.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    policy.act(obs)
    estimate = policy.state_estimator(obs[:, :9])
    assert torch.equal(policy.get_estimated_state(), estimate)
    assert torch.equal(seen[0], torch.cat([obs[:, :3], policy.encoders[0](obs[:, 3:9]), estimate], 1))


@pytest.mark.parametrize("as_module", [True, False])
@pytest.mark.parametrize("cls", [EncoderStateAc, EncoderStateAcRecurrent])
def test_weights_are_found_by_the_names_of_components(cls, as_module):
    source, policy = make(cls), make(cls, OTHER, OTHER_CRITIC, seed=1)
    fresh = {name: value.clone() for name, value in policy.state_dict().items()}
    report = policy.load_misaligned_state_dict(source if as_module else source.state_dict(), SEGMENTS, CRITIC)
    assert isinstance(report, LoadReport)
    first = "memory_a.rnn.weight_ih_l0" if cls.is_recurrent else "actor.0.weight"
    critic = first.replace("memory_a", "memory_c").replace("actor", "critic")
    assert set(report.partial) == {first, critic}
    assert report.skipped == []
    assert len(report.copied) == len(policy.state_dict()) - 2
    theirs, ours = source.state_dict()[first], policy.state_dict()[first]
    # source: pos 0:3, features of scan 3:7, vel 7:9; here: vel 0:2, clock 2:3, pos 3:6, features 6:10
    assert torch.equal(ours[:, 0:2], theirs[:, 7:9])
    assert torch.equal(ours[:, 2:3], fresh[first][:, 2:3])
    assert torch.equal(ours[:, 3:6], theirs[:, 0:3])
    assert torch.equal(ours[:, 6:10], theirs[:, 3:7])


def test_with_new_columns_at_zero_a_new_component_changes_nothing():
    source = make()
    policy = make(EncoderStateAc, {**SEGMENTS, "clock": (1,)}, {**CRITIC, "clock": (1,)}, seed=1)
    policy.load_misaligned_state_dict(source.state_dict(), SEGMENTS, CRITIC, zero_new=True)
    obs = torch.randn(3, 11)
    got, _ = policy.infer(torch.cat([obs, torch.randn(3, 1)], 1))
    torch.testing.assert_close(got, source.infer(obs)[0])


def test_encoders_are_matched_by_name_not_by_position():
    source, policy = make(names=("pos", "scan")), make(seed=1, names=("scan", "pos"))
    policy.load_misaligned_state_dict(source, SEGMENTS, CRITIC)
    assert torch.equal(policy.encoders[0].model[0].weight, source.encoders[1].model[0].weight)
    assert torch.equal(policy.encoders[1].model[0].weight, source.encoders[0].model[0].weight)
    obs = torch.randn(3, 11)
    assert torch.equal(policy.infer(obs)[0], source.infer(obs)[0])


def test_a_component_of_another_size_keeps_its_fresh_encoder():
    smaller = {**SEGMENTS, "scan": (4,)}
    source, policy = make(segments=smaller, critic={**CRITIC, "scan": (4,)}), make(seed=1)
    fresh = policy.encoders[0].model[0].weight.clone()
    report = policy.load_misaligned_state_dict(source.state_dict(), smaller, {**CRITIC, "scan": (4,)})
    assert torch.equal(policy.encoders[0].model[0].weight, fresh)
    assert "encoders.0.model.0.weight" in report.skipped
    assert "critic_encoders.0.model.0.weight" in report.skipped
    assert "state_estimator.model.0.weight" in report.partial
    assert "state_estimator.model.2.weight" in report.copied
    assert torch.equal(policy.actor[0].weight[:, :3], source.actor[0].weight[:, :3])


@pytest.mark.parametrize("zero_new", [False, True])
def test_statistics_of_observations_move_with_their_components(zero_new):
    source, policy = make(), make(segments=OTHER, critic=OTHER_CRITIC, seed=1)
    for p in (source, policy):
        p.obs_normalizer = build_normalizer(width(p.obs_segments))
    source.obs_normalizer.update(torch.arange(22.0).view(2, 11))
    report = policy.load_misaligned_state_dict(source, SEGMENTS, CRITIC, zero_new)
    assert {"obs_normalizer._mean", "obs_normalizer._var", "obs_normalizer._std"} <= set(report.partial)
    mean, theirs = policy.obs_normalizer.mean, source.obs_normalizer.mean
    assert mean.tolist() == [*theirs[9:].tolist(), 0.0, *theirs[:9].tolist()]
    assert policy.obs_normalizer.std[2] == 1.0, "a component without statistics is not enlarged"


def test_a_source_without_a_matching_parameter_is_refused():
    with pytest.raises(ValueError, match="no parameter of the source fits EncoderStateAc"):
        make().load_misaligned_state_dict({"other.weight": torch.zeros(3)}, SEGMENTS)
