"""Calls of a container's own programs before a script runs, beside it, and after it (§3.3, §6, §7.1).

Usage: boot.py INFO_FOLDER
"""

from __future__ import annotations

import base64
import io
import os
import sys
import tarfile
from pathlib import Path

from wire import Trial


def main(trial: Trial) -> None:
    """Make the calls in their order."""
    allocation, resources = f"api/v1/allocations/{trial.allocation}", os.environ["DET_RESOURCES_ID"]
    trial.ask("GET", "api/v1/me")
    packed = trial.ask("GET", f"api/v1/tasks/{trial.cluster['task_id']}/context_directory")["b64Tgz"]
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
        assert "boot.py" in [os.path.normpath(name) for name in archive.getnames()]
    ids = {"containerId": os.environ["DET_CONTAINER_ID"], "allocationId": trial.allocation}
    more = {"nodeName": "here", "taskId": trial.cluster["task_id"], "acceleratorType": "cpu", "acceleratorUuids": []}
    body = {"allocationId": trial.allocation, "acceleratorData": {**ids, **more}}
    assert trial.ask("POST", f"{allocation}/acceleratorData", body) == {}
    assert trial.ask("POST", f"{allocation}/proxy_address", {"proxyAddress": "127.0.0.1"}) == {}
    found = trial.ask("GET", f"{allocation}/resources/{resources}/rendezvous")["rendezvousInfo"]
    assert (len(found["addresses"]), found["rank"], len(found["slots"])) == (1, 0, 1)
    running = {"allocationId": trial.allocation, "requestUuid": "r", "numPeers": 1, "rank": 0, "nodeName": "here"}
    assert trial.ask("POST", f"{allocation}/notify_container_running", {**running, "data": {}}) == {}
    for word in ("waiting", "ready"):
        assert trial.ask("POST", f"{allocation}/{word}", {"allocationId": trial.allocation}) == {}
    trial.ask("POST", f"{allocation}/resources/{resources}/daemon")
    ship(trial)
    trial.start()
    if trial.run_id == 1:
        trial.ask("POST", f"{allocation}/signals/pending_preemption")
        trial.wait_for_preemption()
        assert trial.should_preempt()
    trial.close()


def ship(trial: Trial) -> None:
    """Ship lines of a log, in the names of the log shipper."""
    line = {
        "task_id": trial.cluster["task_id"],
        "allocation_id": trial.allocation,
        "agent_id": trial.cluster["agent_id"],
        "container_id": os.environ["DET_CONTAINER_ID"],
        "rank_id": 3,
        "timestamp": "2024-01-01T00:00:00.25+00:00",
        "level": "LOG_LEVEL_WARNING",
        "stdtype": "stderr",
        "source": "task",
        "log": f"shipped by run {trial.run_id}\n",
    }
    assert trial.ask("POST", "api/v1/task/logs", {"logs": [line]}) == {}


if __name__ == "__main__":
    main(Trial(Path(sys.argv[1])))
