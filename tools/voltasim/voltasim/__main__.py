"""python -m voltasim"""
import sys

from .cli import main

try:
    main()
except BrokenPipeError:
    sys.stderr.close()
