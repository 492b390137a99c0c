"""Where the ranks go: which machines and how many slots of each, and how a launcher gets to the other ones.

``_place`` and ``_places`` find the machines (options, a master's allocation, Slurm, MPI), ``_hosts`` reads their names,
``_slots`` counts what this one has. ``_ports`` and ``_secret`` see that ranks can meet, and that nobody else joins.
``_ssh`` and ``_containers`` bring the launcher's socket to machines on which one program starts ranks.
"""
