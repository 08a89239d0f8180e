"""The command line: train, resume, eval, play, plot, tasks, check-env, bench."""
