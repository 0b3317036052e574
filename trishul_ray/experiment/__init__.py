"""The experiment: its fields, its id, and the code that loads and checks it."""

from trishul_ray.experiment.experiment import Experiment

__all__ = ["Experiment"]
