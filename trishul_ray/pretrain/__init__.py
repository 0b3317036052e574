"""Central pretraining of the built-in backbones."""
