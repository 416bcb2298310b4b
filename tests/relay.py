"""A cable between two network devices that can be slow or stuck: `python relay.py DEVICE DEVICE`; no tests in here.

It carries whole Ethernet frames, in order. Lines on stdin change it: `delay SECONDS` (each way), `stall` (keeps all
frames until the next `delay`). Every line is answered with `done`. It ends when stdin does.
"""

import collections
import select
import socket
import sys
import time

ALL_FRAMES = 0x0003  # ETH_P_ALL
SOL_PACKET, PACKET_VNET_HDR = 263, 15  # keeps what the sender left to the device: segmentation and checksums
PACKET_OUTGOING = 4
LARGEST = 1 << 17
NEVER = float("inf")


def opened(device: str) -> socket.socket:
    """A socket that sees every frame that arrives at `device`, whomever it is for."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    found.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    found.bind((device, ALL_FRAMES))
    return found


def carry(first: socket.socket, second: socket.socket) -> None:
    """Passes frames from each to the other until stdin ends."""
    other = {first: second, second: first}
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()  # when it came, where it goes
    delay = 0.0
    while True:
        left = max(waiting[0][0] + delay - time.monotonic(), 0) if waiting and delay < NEVER else None
        ready, _, _ = select.select([first, second, sys.stdin], [], [], left)
        for source in ready:
            if isinstance(source, socket.socket):
                frame, address = source.recvfrom(LARGEST)
                if address[2] != PACKET_OUTGOING:
                    waiting.append((time.monotonic(), other[source], frame))
                continue
            words = sys.stdin.readline().split()
            if not words:
                return
            delay = NEVER if words[0] == "stall" else float(words[1])
            print("done", flush=True)
        while waiting and waiting[0][0] + delay <= time.monotonic():
            _, target, frame = waiting.popleft()
            target.send(frame)


if __name__ == "__main__":
    ends = [opened(device) for device in sys.argv[1:3]]
    print("done", flush=True)
    carry(*ends)
