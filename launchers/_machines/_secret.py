"""The secret by which the ranks of a job know each other."""

from __future__ import annotations

import secrets

from det_core._env import Environment

from .._words._options import UsageError


def job_secret(environment: Environment, *, machines: int, command: str) -> dict[str, str]:
    """Variables that give the processes of a job a secret, if the environment has none.

    Args:
        environment: the launcher's.
        machines: how many machines the job may use.
        command: how the launcher was called, for the message.

    Raises:
        UsageError: several machines need the same secret, and this launcher cannot tell the others. The message holds
            the commands to type.
    """
    if environment.secret:
        return {}
    made = secrets.token_hex(32)
    if machines == 1:
        return {"DET_CORE_SECRET": made}
    raise UsageError(
        "the ranks on several machines need one secret to know each other by. On each machine type\n"
        f"    export DET_CORE_SECRET={made}\n"
        f"    {command}\n"
    )
