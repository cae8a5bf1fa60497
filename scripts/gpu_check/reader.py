"""Another process, which takes a version as a generator's rank does: asked by a pickle, it answers by a line of JSON.

Its first fetch maps the memory; the second is timed.
"""

import asyncio
import hashlib
import json
import pickle
import sys
import time

import torch


def digest(data: torch.Tensor) -> str:
    return hashlib.blake2b(data.cpu().numpy().data, digest_size=16).hexdigest()


def main() -> None:
    from titan_rl.mesh.channel.reader import WeightReader

    setup, device, versions = pickle.loads(sys.stdin.buffer.read())
    begun = time.perf_counter()
    reader, seconds = WeightReader(setup, torch.device(device)), []
    opened = time.perf_counter() - begun
    for version in versions:
        start = time.perf_counter()
        asyncio.run(reader.fetch(version, 60))
        if reader.buffer.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    sums = [digest(reader.buffer[read.into : read.into + read.nbytes]) for read in setup.plan.reads]
    print(json.dumps({"sums": sums, "seconds": seconds[-1], "seconds_open": opened}))


if __name__ == "__main__":
    main()
