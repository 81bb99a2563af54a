"""Why a model cannot be served here; the message says what to do about it."""

from components.startup import WrongSettings


class ModelUnavailable(WrongSettings):
    """The model named cannot be found, fetched or read."""


class UnsupportedModel(WrongSettings):
    """The model was found, but this engine cannot compute it right, and refuses to compute it wrong."""


class DeviceUnavailable(WrongSettings):
    """The device named does not exist, or is not there for this process."""
