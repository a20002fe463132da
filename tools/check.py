"""The checker has become a folder: this file says what to type now."""

import sys

if __name__ == "__main__":
    print("Type: python tools/check -- COMMAND", file=sys.stderr)
    sys.exit(2)
