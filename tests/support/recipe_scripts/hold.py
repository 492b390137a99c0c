"""A script that only lives, so that somebody else can speak for it: until there is a file that says how to exit.

Usage: hold.py FOLDER, in which the file bears the allocation's name
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    word = Path(sys.argv[1], os.environ["DET_ALLOCATION_ID"])
    while not word.exists():
        time.sleep(0.02)
    sys.exit(int(word.read_text()))
