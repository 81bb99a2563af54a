"""Why a model cannot be served; the message says what to do about it."""

from components.errors import MeshError


class ModelUnavailable(MeshError):
    """The model named cannot be found, fetched or read."""


class UnsupportedModel(MeshError):
    """The model was found, but this engine cannot compute it right, and refuses to compute it wrong."""
