"""Run scripts many times, each in a fork of this process, which has paid for the imports: for the tests of mistakes.

    echo '[["singlegpu/images.py", "--epochs", "0"], ["multigpu/gpt.py", "--help"]]' | python tests/many.py

prints [[exit status, stdout, stderr, peak resident memory in KiB], ...] as JSON.
"""

import importlib
import json
import os
import resource
import runpy
import sys
import tempfile
import traceback


def run(script, arguments):
    """In a fork: what the interpreter does with a script."""
    sys.argv, status = [script, *arguments], 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main():
    results = []
    for name in ("torch", "torch._dynamo", "torchvision", "numpy", "tqdm"):
        importlib.import_module(name)
    for script, *arguments in json.load(sys.stdin):
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if not child:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                run(script, arguments)
            _, status, usage = os.wait4(child, 0)
            out.seek(0)
            err.seek(0)
            results.append([os.waitstatus_to_exitcode(status), out.read(), err.read(), usage.ru_maxrss])
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
