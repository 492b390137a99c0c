"""What both trainers share and the core cannot tell: how models lie over processes, the order of data, metrics that
stay on their device. Knows torch, and neither the core nor a trial nor a callback."""

from det_core._optional import check_installed

check_installed("torch", extra="torch", purpose="a trial or a Trainer")
