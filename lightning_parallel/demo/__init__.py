"""Small real modules and datasets that configs, notebooks and tests share.

Ordinary LightningModules: nothing here knows of a strategy, and each trains on one device under a plain Trainer.
Nothing is downloaded: the digits come with scikit-learn, the text with Python, and weights are random.
"""

from lightning_parallel.demo.digits import DigitsClassifier, DigitsDataModule
from lightning_parallel.demo.gpt import GPT
from lightning_parallel.demo.huggingface import HuggingFaceLM
from lightning_parallel.demo.text import TextDataModule

__all__ = ["GPT", "DigitsClassifier", "DigitsDataModule", "HuggingFaceLM", "TextDataModule"]
