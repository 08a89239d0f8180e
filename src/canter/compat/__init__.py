"""Names and dialects of other libraries: their simulators, configurations, checkpoints and exporters."""
