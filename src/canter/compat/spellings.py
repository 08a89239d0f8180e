"""Names that other libraries use for settings, observation groups and final observations."""

# ApexRL's spelling of a setting -> canter's.
OTHER_SPELLINGS = {
    "num_steps": "num_steps_per_env",
    "num_epochs": "num_learning_epochs",
    "batch_size": "num_mini_batches",
    "minibatch_size": "num_mini_batches",
    "clip_range": "clip_param",
    "clip_range_vf": "use_clipped_value_loss",
    "gae_lambda": "lam",
    "vf_coef": "value_loss_coef",
    "ent_coef": "entropy_coef",
    "learning_rate_schedule": "schedule",
    "normalize_observations": "empirical_normalization",
    "optimizer": "optimizer_class_name",
    "min_log_std": "clip_min_std",
    "max_log_std": "clip_max_std",
}

# The actor's group of observations, and the critic's, in order of preference.
ACTOR_GROUPS = ("obs", "policy", "actor", "actor_obs")
CRITIC_GROUPS = ("privileged_obs", "critic_obs", "critic")
# What the critic sees beside the actor's groups.
PRIVILEGED = "privileged"
# MuJoCo Playground's pair: "state" alone is an ordinary key of a dict observation, so both must be present.
PLAYGROUND_PAIR = ("state", "privileged_state")

# final_obs: Gymnasium and Isaac Lab; final_observation: ManiSkill, ApexRL and Gymnasium < 1.0; terminal: mjlab;
# terminal_obs: an AMP fork of rsl_rl; final_observations: Holosoma; terminal_observation: SB3.
# extras["observations"]["raw"], of FastTD3's Playground, is read if none of these is present.
FINAL_OBS_NAMES = ("final_obs", "final_observation", "terminal", "terminal_obs", "final_observations")
FINAL_OBS_NAMES += ("terminal_observation",)
FINAL_CRITIC_OBS_NAMES = ("final_critic_obs", "final_critic_observation", "final_privileged_obs")

# Modules whose class names in a training dict are translated; nothing is imported from them.
TRANSLATED_MODULES = ("rsl_rl.",)
