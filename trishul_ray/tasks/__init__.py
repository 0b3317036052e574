"""What a model is trained for: batches in, loss and metrics out."""

from trishul_ray.tasks.base import Task
from trishul_ray.tasks.image_classification import ImageClassification, image_task
from trishul_ray.tasks.question_answering import QuestionAnswering
from trishul_ray.tasks.sequence_classification import SequenceClassification
from trishul_ray.tasks.text2text import TextToClass
from trishul_ray.tasks.verbalizer import Verbalizer

__all__ = [
    "ImageClassification",
    "QuestionAnswering",
    "SequenceClassification",
    "Task",
    "TextToClass",
    "Verbalizer",
    "image_task",
]
