"""Connections to the doorbells of all peers, by agent."""

from components.errors import TransferFailed
from components.kv_transfer.doorbell import DoorbellClient, connect


class DoorbellClients:
    def __init__(self) -> None:
        self._clients: dict[str, DoorbellClient] = {}

    async def connect(self, agent: str, address: str) -> None:
        client = self._clients.get(agent)
        if client is not None and not client.is_broken:
            return
        opened = await connect(address, agent)
        client = self._clients.get(agent)
        if client is not None and not client.is_broken:  # another caller connected meanwhile
            await opened.close()
        else:
            self._clients[agent] = opened

    def to(self, agent: str) -> DoorbellClient:
        client = self._clients.get(agent)
        if client is None:
            raise TransferFailed(f"no connection to {agent}")
        return client

    async def disconnect(self, agent: str) -> None:
        client = self._clients.pop(agent, None)
        if client is not None:
            await client.close()

    async def disconnect_all(self) -> None:
        for agent in list(self._clients):
            await self.disconnect(agent)
