"""KV events as engines publish them: real ZMQ sockets of one or more data-parallel ranks."""

import asyncio

import zmq
import zmq.asyncio
from msgspec import msgpack


class Publisher:
    """KV events as vLLM publishes them: topic, number, payload; and what was said lately, again on request."""

    def __init__(self, *, kept=10_000, rank=0, ports=(0, 0)):
        self.said, self.kept, self.lost, self.rank = [], kept, 0, rank
        self.context = zmq.asyncio.Context()
        self.live = self.context.socket(zmq.PUB)
        self.port = self.bind(self.live, ports[0])
        self.again = self.context.socket(zmq.ROUTER)
        self.replay_port = self.bind(self.again, ports[1])
        self.answering = asyncio.get_running_loop().create_task(self.answer())

    @staticmethod
    def bind(socket, port):
        if not port:
            return socket.bind_to_random_port("tcp://127.0.0.1")
        socket.bind(f"tcp://127.0.0.1:{port}")
        return port

    async def say(self, *events, lose=False):
        payload = msgpack.encode([1.5, list(events), self.rank])
        number = len(self.said)
        self.said.append(payload)
        if not lose:
            await self.live.send_multipart([b"kv@A", number.to_bytes(8, "big"), payload])

    async def answer(self):
        while True:
            who, empty, start = await self.again.recv_multipart()
            first = max(int.from_bytes(start, "big"), len(self.said) - self.kept)
            for number in range(first, len(self.said)):
                await self.again.send_multipart([who, empty, b"kv@A", number.to_bytes(8, "big"), self.said[number]])
            await self.again.send_multipart([who, empty, b"", b"\xff" * 8, b""])

    def close(self):
        self.answering.cancel()
        self.context.destroy(linger=0)


def publishers(ranks):
    """One publisher a data-parallel rank, on consecutive ports, as engines have them."""
    while True:
        made = [Publisher()]
        try:
            for rank in range(1, ranks):
                made.append(Publisher(rank=rank, ports=(made[0].port + rank, made[0].replay_port + rank)))
        except zmq.ZMQError:  # somebody else has that port
            for publisher in made:
                publisher.close()
        else:
            return made
