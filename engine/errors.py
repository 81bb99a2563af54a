"""Reasons why a model cannot be served."""

from components.startup import WrongSettings


class ModelUnavailable(WrongSettings):
    """The model cannot be found, downloaded or read."""


class UnsupportedModel(WrongSettings):
    """This engine would compute the model wrong."""


class DeviceUnavailable(WrongSettings):
    """The device does not exist or is not accessible."""
