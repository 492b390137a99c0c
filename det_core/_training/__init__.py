"""Parts shared by both trainers: models on processes, the order of data, metrics that stay on their device."""

from det_core._optional import check_installed

check_installed("torch", extra="torch", purpose="a trial or a Trainer")
