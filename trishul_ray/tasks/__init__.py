"""What a model is trained for: batches in, loss and metrics out."""

from trishul_ray.tasks.base import Task
from trishul_ray.tasks.image_classification import ImageClassification, image_task

__all__ = ["ImageClassification", "Task", "image_task"]
