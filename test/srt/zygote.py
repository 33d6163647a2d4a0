# SPDX-License-Identifier: Apache-2.0
"""Fresh interpreters in a fraction of a second: a process that has imported torch and transformers, and nothing of
sglang, forks one child a question. Run as a script it is that process; ``Zygote`` is its client."""

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from typing import NamedTuple

# What takes most of the time of importing sglang's server, and imports nothing of it.
PRELOADED = [
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "transformers.conversion_mapping",
    "transformers.integrations.flash_attention",
    "transformers.models.auto",
    "IPython",
    "aiohttp.web",
    "fastapi",
    "fsspec",
    "gguf",
    "httpx",
    "networkx",
    "openai",
    "pydantic.v1",
    "pytest",
    "requests",
    "triton",
    "tvm_ffi",
    "uvicorn",
    "xgrammar",
]


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Zygote:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code, **env):
        """The code in a fresh process. A variable that is None is removed from the environment."""
        self.process.stdin.write(json.dumps([code, env]) + "\n")
        self.process.stdin.flush()
        return Result(*json.loads(self.process.stdout.readline()))

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def answer(code, env):
    out, err = (os.memfd_create(name) for name in ("out", "err"))
    pid = os.fork()
    if pid == 0:
        run_child(code, env, out, err)
    status = os.waitpid(pid, 0)[1]
    texts = []
    for fd in (out, err):
        with os.fdopen(fd, "rb") as file:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return os.waitstatus_to_exitcode(status), *texts


def run_child(code, env, out, err):
    os.dup2(out, 1)
    os.dup2(err, 2)
    for name, value in env.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    failed = 0
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        failed = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failed)


def main():
    for module in PRELOADED:
        with contextlib.suppress(ImportError):  # one that is missing takes no time
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    # torchvision is imported after what sglang declares of it.
    assert not {"sglang", "torchvision"} & {name.partition(".")[0] for name in sys.modules}
    replies = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        replies.write(json.dumps(answer(*json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
