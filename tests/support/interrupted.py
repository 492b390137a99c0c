"""Script run that sends itself a signal where it prints certain words for the first time.

    python interrupted.py WORDS NUMBER SCRIPT ARGUMENT...

Whoever reads the words in a pipe may be too late with a signal: a training of a second has ended by then.
"""

import os
import runpy
import sys

words, number = sys.argv[1], int(sys.argv[2])
sys.argv[:] = sys.argv[3:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
write = sys.stdout.write


def watched(text):
    """Write to stdout, and send the signal at the words."""
    global words
    written = write(text)
    if words and words in text:
        words = ""
        os.kill(os.getpid(), number)
    return written


sys.stdout.write = watched
runpy.run_path(sys.argv[0], run_name="__main__")
