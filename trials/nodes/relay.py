"""A link that takes its time: `relay.py FIRST SECOND SECONDS` passes on Ethernet frames between two
devices, each that much later. `relay.py whole DEVICE` has the kernel send whole frames there.

For kernels without netem. Frames that a relay reads must have their checksums, and be no longer
than the wire allows, which the kernel leaves to the device where that says it can.
"""

from __future__ import annotations

import array
import fcntl
import heapq
import select
import socket
import struct
import sys
import time

_ETH_P_ALL, _SIOCETHTOOL = 3, 0x8946
_SET_FEATURES = (0x1F, 0x24, 0x17)  # ETHTOOL_STSO, _SGSO and _STXCSUM of <linux/ethtool.h>


def relay(first: str, second: str, seconds: float) -> None:
    """Pass frames on, in both directions, until this process is ended."""
    ends = [_raw_socket(first), _raw_socket(second)]
    due: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        for end in select.select(ends, [], [], wait)[0]:
            frame, (_, _, kind, *_) = end.recvfrom(65536)
            if kind != socket.PACKET_OUTGOING:
                number += 1
                other = 1 - ends.index(end)
                heapq.heappush(due, (time.monotonic() + seconds, number, other, frame))
        while due and due[0][0] <= time.monotonic():
            _, _, other, frame = heapq.heappop(due)
            ends[other].send(frame)


def send_whole_frames(device: str) -> None:
    """Leave neither checksums nor the splitting of long packets to the device."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for command in _SET_FEATURES:
            value = array.array("B", struct.pack("II", command, 0))
            address, _ = value.buffer_info()
            request = struct.pack("16sP", device.encode(), address)
            fcntl.ioctl(asked.fileno(), _SIOCETHTOOL, request)


def _raw_socket(device: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    made.bind((device, 0))
    return made


if __name__ == "__main__":
    if sys.argv[1] == "whole":
        send_whole_frames(sys.argv[2])
    else:
        relay(sys.argv[1], sys.argv[2], float(sys.argv[3]))
