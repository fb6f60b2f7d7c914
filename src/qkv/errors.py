"""The exceptions that qkv raises for its users.

Each message is one line (or one line per problem) that says what is wrong, where, and the remedy. The command line
prints it without a traceback and exits with 2. An `AssertionError` means a bug in qkv, never a mistake of the user.
"""


class QkvError(ValueError):
    """Base of every error that qkv raises on purpose."""


class ConfigError(QkvError):
    """A configuration is malformed or describes a model that cannot exist."""


class CheckpointError(QkvError):
    """A saved model is incomplete, damaged, or not understood."""


class CacheError(QkvError):
    """A KV cache cannot do what was asked: full, or rolled back too far."""


class BackendError(QkvError):
    """An attention backend was forced but cannot serve the call."""


class DataError(QkvError):
    """A data file is missing, empty or corrupt, or holds tokens outside the vocabulary."""


class GenerationError(QkvError):
    """A generation request cannot be served: too long, or contradictory."""


class TrainingError(QkvError):
    """A training run cannot go on: its loss is no longer a number."""


class EngineError(QkvError):
    """The native engine cannot be built, or cannot run this model."""
