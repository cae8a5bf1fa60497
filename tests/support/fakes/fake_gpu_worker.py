"""A worker of scripts/gpu_check.py that does what its rows are called, for tests of who supervises it."""

import json
import os
import sys
import time

with os.fdopen(int(sys.argv[1]), "w") as answers:
    for line in sys.stdin:
        row = line.strip()
        if row == "hangs":
            time.sleep(1000)
        if row == "dies":
            os._exit(7)
        answer = {"failed": "as it was told"} if row == "raises" else {"figures": {"pid": os.getpid()}}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
