"""The command attnctl of the wheel: the program that lies beside the library."""
import os
import sys

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "native", "attnctl")


def main() -> None:
    os.execv(PROGRAM, ["attnctl", *sys.argv[1:]])
