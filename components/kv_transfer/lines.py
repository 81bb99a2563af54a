"""Connections to the doorbells of all peers, by agent."""

from components.errors import TransferFailed
from components.kv_transfer.doorbell import Line, dial


class Lines:
    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}

    async def connect(self, agent: str, address: str) -> None:
        line = self._lines.get(agent)
        if line is not None and not line.is_broken:
            return
        dialled = await dial(address, agent)
        line = self._lines.get(agent)
        if line is not None and not line.is_broken:  # another caller connected meanwhile
            await dialled.hang_up()
        else:
            self._lines[agent] = dialled

    def to(self, agent: str) -> Line:
        line = self._lines.get(agent)
        if line is None:
            raise TransferFailed(f"no connection to {agent}")
        return line

    async def disconnect(self, agent: str) -> None:
        line = self._lines.pop(agent, None)
        if line is not None:
            await line.hang_up()

    async def disconnect_all(self) -> None:
        for agent in list(self._lines):
            await self.disconnect(agent)
