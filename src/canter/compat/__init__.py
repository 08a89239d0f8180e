"""Names and dialects of other libraries: rsl_rl, st_rl, ApexRL, Isaac Lab, mjlab and legged_gym.

The rest of canter asks here through a few functions: `training_dicts.translated` and `training_dicts.complete`,
`checkpoints.import_state`, `arguments.documented`, and the classes of `names`, which its own classes inherit.
"""
