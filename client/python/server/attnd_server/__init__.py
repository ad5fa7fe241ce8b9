"""The daemon attnd as a Python package: the program with the libraries it needs.

`attnd` in a shell starts it, attnd.serve() of the package attnd starts it as a child of a Python process.
"""
import os
import sys

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "native", "attnd")


def main() -> None:
    """The command attnd."""
    os.execv(PROGRAM, ["attnd", *sys.argv[1:]])
