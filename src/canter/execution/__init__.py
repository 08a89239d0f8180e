"""How pure tensor functions are run: eagerly, as CUDA graphs, or on a CPU as recordings. No algorithm is known here."""
