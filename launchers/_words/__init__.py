"""A launcher's command line: its own options, those of the framework, and the script with its arguments.

``_parser`` splits it, for launchers that hand unknown options on; ``_options`` has what all launchers take, and
``_command`` how a script is run.
"""
