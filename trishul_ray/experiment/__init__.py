"""An experiment: its fields and id, how it is read, and what follows from its data and model."""

from trishul_ray.experiment.experiment import Experiment

__all__ = ["Experiment"]
