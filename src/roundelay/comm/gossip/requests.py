"""One-sided operations of ranks that share no memory with this one: read this rank's vector, or add to it."""

from __future__ import annotations

import torch
from torch import Tensor

from roundelay.comm.gossip.transport import ConnectionClosed, Message, MessageType, PeerConnection, bytes_of
from roundelay.comm.vectors import SharedVector
from roundelay.core.update_log import Op, UpdateLog


class RequestServer:
    """Perform GET and ADD requests on the vector of this rank. For the gossip thread."""

    def __init__(self, shared_weights: SharedVector) -> None:
        self.shared_weights = shared_weights
        self.update_log: UpdateLog | None = None

    def serve(
        self, connection: PeerConnection, message: Message, payload: Tensor | None, awaited: dict[PeerConnection, Tensor]
    ) -> None:
        """Perform a request. An ADD is served twice: its header, for which memory goes to `awaited`, and its payload.

        Raises ConnectionClosed if the message is no request.
        """
        if message.kind is MessageType.GET and not message.bytes:
            with self.shared_weights.locked():
                number, version = self.shared_weights.count()
                self._log(Op.REMOTE_GET, number, connection.client)
                copy = self.shared_weights.vector.clone()
            connection.send(MessageType.REPLY, version, bytes_of(copy))
        elif message.kind is MessageType.ADD and payload is None:
            buffer = torch.empty_like(self.shared_weights.vector)
            connection.receive(bytes_of(buffer))
            awaited[connection] = buffer
        elif message.kind is MessageType.ADD and payload is not None:
            with self.shared_weights.locked():
                number, version = self.shared_weights.count(writes=1)
                self._log(Op.REMOTE_ADD, number, connection.client)
                self.shared_weights.vector.add_(payload)
            connection.send(MessageType.REPLY, version - 1)
        else:
            raise ConnectionClosed(f"unexpected message {message.kind.name}")

    def _log(self, op: Op, number: int, client: int) -> None:
        if self.update_log is not None:
            self.update_log.append(op, self.shared_weights.rank, number, client, -1)
