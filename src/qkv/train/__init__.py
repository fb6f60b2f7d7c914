"""Training: batches of a text, an optimizer and its schedule, and the loop."""

from qkv.train.data import random_windows, split
from qkv.train.loop import Plan, Step, train
from qkv.train.optim import learning_rate, optimizer

__all__ = ["Plan", "Step", "learning_rate", "optimizer", "random_windows", "split", "train"]
