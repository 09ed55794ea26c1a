"""Latency of ``mmrl serve``: one client, many clients, and many beside clients that send half a request.

    python benchmarks/serve.py --clients 200 --half-sent 50

A server in a process of its own serves ``jpeg:compressibility`` on the loopback; each request is one picture of
64 x 64. Prints the median and the 99th percentile of the latency. Run with an installed mmrl.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import sys
import time

import numpy
from PIL import Image

from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards import wire
from mmrl.rewards.subprocess_server import started_elsewhere


def request() -> bytes:
    """One request, head and body."""
    pixels = numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), numpy.uint8)
    sample = Sample(Prompt("p", "a picture"), SampleId(0, 0, 0, 0), Image.fromarray(pixels))
    body = wire.encode_request([sample], [], 0)[0]
    head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def client(port: int, message: bytes, count: int) -> list[float]:
    """Latencies in seconds of ``count`` requests, one after another on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    spent = []
    for _ in range(count):
        began = time.perf_counter()
        writer.write(message)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise SystemExit(head.decode())
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        spent.append(time.perf_counter() - began)
    writer.close()
    return spent


async def clients(port: int, message: bytes, number: int, count: int) -> list[float]:
    found = await asyncio.gather(*(client(port, message, count) for _ in range(number)))
    return [seconds for one in found for seconds in one]


def half_sent(port: int, number: int) -> list[socket.socket]:
    """Connections whose request declares 64 MB, brings a little, and waits."""
    head = b"POST /score HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 64000000\r\n\r\n{"
    made = [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]
    for one in made:
        one.sendall(head)
    return made


def line(name: str, spent: list[float]) -> str:
    p50, p99 = statistics.median(spent), sorted(spent)[int(0.99 * (len(spent) - 1))]
    return f"{name:<40} {len(spent):>6} requests   p50 {1000 * p50:7.2f} ms   p99 {1000 * p99:7.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=10, help="of each client")
    parser.add_argument("--half-sent", type=int, default=50)
    given = parser.parse_args()
    message = request()
    with started_elsewhere("jpeg:compressibility", port=0) as (_, said):
        port = int(said.partition(" at ")[2].partition(" ")[0].rpartition(":")[2])
        print(said, file=sys.stderr)
        asyncio.run(clients(port, message, 1, 20))  # warm up
        print(line("1 client", asyncio.run(clients(port, message, 1, 200))))
        many = f"{given.clients} clients"
        print(line(many, asyncio.run(clients(port, message, given.clients, given.requests))))
        waiting = half_sent(port, given.half_sent)
        beside = asyncio.run(clients(port, message, given.clients, given.requests))
        print(line(f"{many} beside {given.half_sent} half-sent", beside))
        for one in waiting:
            one.close()


if __name__ == "__main__":
    main()
