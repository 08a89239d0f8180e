"""From a run to a robot: loading a policy, exporting it as a bundle, checking the bundle, and simulating with it.

Nothing is imported here: `canter.export.runtime` runs where only numpy and onnxruntime are installed.
"""
