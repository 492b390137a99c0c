"""What a launcher does while its job runs: signals, grace, the first failure, the exit status, and nothing left behind.

``_launch`` begins it: the framework's agent (``_agent``) starts as a child, and ``_supervisor`` hears of each rank's
wrapper over a link (``_links``), keeps what became of it (``_ranks``), and ends all processes (``_processes``) once it
is time. ``_notices`` is what a person reads of it.
"""
