"""Search spaces from flags and YAML, and the flags of `canter train` that they become."""

import pytest

from canter.cli.options import parse_train
from canter.cli.search_space import Choice, Range, grid, parse_space, settings_of, starting_point, suggest, to_flags


@pytest.fixture(scope="module")
def options():
    return parse_train(["Pendulum-v1", "--num-envs", "4"])[0]


class FixedTrial:
    """Takes the highest number and the last choice, and remembers what it was asked."""

    def __init__(self):
        self.asked = {}

    def suggest_float(self, name, low, high, log=False, step=None):
        self.asked[name] = ("float", low, high, log, step)
        return high

    def suggest_int(self, name, low, high, log=False, step=1):
        self.asked[name] = ("int", low, high, log, step)
        return high

    def suggest_categorical(self, name, choices):
        self.asked[name] = tuple(choices)
        return choices[-1]


def test_ranges_are_whole_where_the_setting_is(options):
    words = ["learning_rate=log:1e-4..1e-2", "entropy_coef=0..1", "num_learning_epochs=2..10/2", "gamma=0.9..0.98/0.04"]
    trial = FixedTrial()
    settings = suggest(trial, parse_space(words, options))
    assert trial.asked == {
        "learning_rate": ("float", 1e-4, 1e-2, True, None),
        "entropy_coef": ("float", 0, 1, False, None),
        "num_learning_epochs": ("int", 2, 10, False, 2),
        "gamma": ("float", 0.9, 0.98, False, 0.04),
    }
    assert settings == {"learning_rate": 1e-2, "entropy_coef": 1, "num_learning_epochs": 10, "gamma": 0.98}


def test_choices_may_be_lists_and_truth_values_which_optuna_sees_as_text(options):
    space = parse_space(["policy.actor-hidden-dims=[64,64],[256]", "normalize_rewards=true,false"], options)
    trial = FixedTrial()
    assert suggest(trial, space) == {"policy.actor_hidden_dims": [256], "normalize_rewards": False}
    assert trial.asked == {"policy.actor_hidden_dims": ("[64, 64]", "[256]"), "normalize_rewards": (True, False)}
    assert settings_of({"policy.actor_hidden_dims": "[64, 64]"}, space) == {"policy.actor_hidden_dims": [64, 64]}


def test_yaml_files_have_the_same_entries_as_flags_and_flags_override_them(options, tmp_path):
    file = tmp_path / "space.yaml"
    file.write_text("learning_rate: {low: 1e-4, high: 1e-2, log: true}\nnum_mini_batches: [2, 4]\nlam: 0.8..0.99\n")
    space = parse_space([str(file), "lam=0.9..0.95"], options)
    assert space == {
        "learning_rate": Range(1e-4, 1e-2, log=True),
        "num_mini_batches": Choice((2, 4)),
        "lam": Range(0.9, 0.95),
    }


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("learning_rat=0..1", "'learning_rate'"),
        ("lr=0..1", "'learning_rate'"),
        ("nonsense=0..1", "there are .*gamma"),
        ("policy.nope=1,2", "'policy.nope'"),
        ("gamma=0.9", "needs a range or two choices"),
        ("gamma=lin:0..1", "must be log, not 'lin'"),
        ("gamma=1..0", "empty"),
        ("gamma=log:0..1", "empty, or logarithmic"),
        ("gamma=a..b", "needs numbers"),
        ("nothing.yaml", "neither a file nor a range"),
        ("seed=1,2", "'seed' is no setting to search"),
        ("runs-dir=a,b", "'runs_dir' is no setting to search"),
    ],
)
def test_mistakes_name_the_setting_and_the_way_out(options, word, message):
    with pytest.raises(ValueError, match=message):
        parse_space([word], options)


def test_an_empty_space_and_an_unknown_key_of_a_range_are_errors(options, tmp_path):
    with pytest.raises(ValueError, match="name the settings to search"):
        parse_space([], options)
    file = tmp_path / "space.yaml"
    file.write_text("gamma: {low: 0, hihg: 1}")
    with pytest.raises(ValueError, match="'hihg'"):
        parse_space([str(file)], options)


def test_the_starting_point_is_the_preset_if_it_lies_inside(options):
    space = parse_space(["learning_rate=log:1e-4..1e-2", "policy.actor_hidden_dims=[64,64],[32]"], options)
    assert starting_point(space, options) == {"learning_rate": 1e-3, "policy.actor_hidden_dims": "[64, 64]"}
    assert starting_point(parse_space(["learning_rate=2e-3..1e-2"], options), options) is None
    assert starting_point(parse_space(["num_learning_epochs=1..9/4"], options), options) is None  # 10 in the preset
    assert starting_point(parse_space(["num_mini_batches=1..31/2"], options), options) is None  # 16 is no step


def test_flags_make_the_settings_that_they_are_made_of():
    settings = {
        "learning_rate": 0.002,
        "normalize_rewards": False,
        "use_clipped_value_loss": True,
        "policy.actor_hidden_dims": [32, 16],
        "rnd_cfg": {"weight": 0.5},
        "num_envs": 16,
        "policy.activation": "elu",
    }
    options, config = parse_train(["Pendulum-v1", *to_flags(settings)])
    assert options.num_envs == 16
    for name in ("learning_rate", "normalize_rewards", "use_clipped_value_loss"):
        assert config["algorithm"][name] == settings[name]
    assert config["algorithm"]["rnd_cfg"]["weight"] == 0.5
    assert (config["policy"]["actor_hidden_dims"], config["policy"]["activation"]) == ([32, 16], "elu")


def test_a_grid_has_every_choice_and_step_and_refuses_other_ranges(options):
    space = parse_space(["num_mini_batches=2..8/3", "gamma=0.9..1/0.05", "schedule=fixed,linear"], options)
    values = grid(space)
    assert values["num_mini_batches"] == [2, 5, 8]
    assert values["gamma"] == pytest.approx([0.9, 0.95, 1.0])
    assert values["schedule"] == ["fixed", "linear"]
    with pytest.raises(ValueError, match="a grid needs choices or steps; lam=0.8..0.9"):
        grid(parse_space(["lam=0.8..0.9"], options))


@pytest.mark.parametrize(
    ("text", "message"), [("gamma: [0.9", "space.yaml is not YAML"), ("1: [2, 3]", "no setting '1'")]
)
def test_mistakes_in_a_file_name_it_or_the_setting(options, tmp_path, text, message):
    file = tmp_path / "space.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse_space([str(file)], options)


def test_none_is_a_choice_of_numbers_and_of_mappings(options):
    for word, value in (("target_kl=null,0.1", 0.1), ("rnd_cfg=null,{weight: 0.1}", {"weight": 0.1})):
        ((name, entry),) = parse_space([word], options).items()
        parsed = [parse_train(["Pendulum-v1", *to_flags({name: one})])[0].settings for one in entry.ends]
        assert [getattr(settings, name) for settings in parsed] == [None, value]
